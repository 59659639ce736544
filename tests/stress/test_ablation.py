"""The ablation and extrapolation benchmarks as commands, on real corpora."""

import json

import pytest
from conftest import ROOT, run_script

BENCHMARK = ROOT / "scripts" / "benchmark.py"


@pytest.mark.stress
def test_ablation_of_two_variants(tmp_path):
    done = run_script(
        BENCHMARK, "ablation", "--seeds", "2", "--steps", "2", "--rounds", "1", "--folder", "runs",
        "--only", "linear(64)", "--out", "out.jsonl", "--png", "a.png", cwd=tmp_path, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "out.jsonl").read_text())["rows"]
    by_name = {(row["corpus"], row["variant"]): row for row in rows}
    assert by_name.keys() == {(c, f) for c in ("tales", "pysource") for f in ("full", "linear(64)")}
    for corpus in ("tales", "pysource"):
        full, linear = by_name[corpus, "full"], by_name[corpus, "linear(64)"]
        assert full["loss_difference"] == full["loss_difference_std"] == 0
        assert full["relative_speed"] == 1
        assert linear["loss_difference"] == pytest.approx(linear["mean_loss"] - full["mean_loss"])
        assert len(set(full["losses"])) == 2
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.stress
def test_extrapolation(tmp_path):
    done = run_script(
        BENCHMARK, "extrapolation", "--seeds", "1", "--steps", "2", "--windows", "1", "--folder",
        "runs", "--out", "out.jsonl", "--png", "a.png", cwd=tmp_path, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "out.jsonl").read_text())["rows"]
    assert [row["name"] for row in rows[:5]] == ["rope", "alibi", "learned", "sinusoidal", "none"]
    assert len(rows) == 9
    assert all(list(row["mean_losses"]) == ["1", "2", "4"] for row in rows)
    for row in rows:  # after two steps the context does not help yet, and the tokens are the same
        assert row["mean_losses"]["1"] == pytest.approx(row["mean_losses"]["2"], abs=0.02)
        assert row["mean_losses"]["1"] == pytest.approx(row["mean_losses"]["4"], abs=0.02)
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
