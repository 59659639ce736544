"""The benchmarks of forms and of lengths as a user starts them, on real corpora."""

import json

import pytest
from conftest import ROOT, run_script

BENCHMARK = ROOT / "scripts" / "benchmark.py"


@pytest.mark.stress
def test_two_forms_for_two_steps(tmp_path):
    done = run_script(
        BENCHMARK, "ablation", "--seeds", "2", "--steps", "2", "--rounds", "1", "--folder", "runs",
        "--only", "linear(64)", "--out", "out.jsonl", "--png", "a.png", cwd=tmp_path, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "out.jsonl").read_text())["rows"]
    named = {(row["corpus"], row["form"]): row for row in rows}
    assert named.keys() == {(c, f) for c in ("tales", "pysource") for f in ("full", "linear(64)")}
    for corpus in ("tales", "pysource"):
        full, linear = named[corpus, "full"], named[corpus, "linear(64)"]
        assert full["against_full"] == full["spread"] == 0
        assert full["of_full"] == 1
        assert linear["against_full"] == pytest.approx(linear["mean"] - full["mean"])
        assert len(set(full["losses"])) == 2
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.stress
def test_lengths_beyond_the_training(tmp_path):
    done = run_script(
        BENCHMARK, "extrapolation", "--seeds", "1", "--steps", "2", "--windows", "1", "--folder",
        "runs", "--out", "out.jsonl", "--png", "a.png", cwd=tmp_path, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "out.jsonl").read_text())["rows"]
    assert [row["name"] for row in rows[:5]] == ["rope", "alibi", "learned", "sinusoidal", "none"]
    assert len(rows) == 9
    assert all(list(row["means"]) == ["1", "2", "4"] for row in rows)
    for row in rows:  # after two steps nothing before a token tells anything of it, and the tokens are the same
        assert row["means"]["1"] == pytest.approx(row["means"]["2"], abs=0.02)
        assert row["means"]["1"] == pytest.approx(row["means"]["4"], abs=0.02)
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
