"""scripts/benchmark.py as a user meets it, on a model small enough to be timed in seconds."""

import json

import pytest
from conftest import ROOT, run_script

BENCHMARK = ROOT / "scripts" / "benchmark.py"


def test_decode_beside_transformers_from_any_folder(tmp_path):
    done = run_script(
        BENCHMARK, "decode", "--shape", "tiny", "--device", "cpu", "--prompt", "8", "--new", "6", "--repeats", "2",
        "--subjects", "transformers-fp32,fp32,bf16@3,int8", "--out", "line.json", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert json.loads((tmp_path / "line.json").read_text()) == result
    assert [(row["name"], row["batch"]) for row in result["rows"]] == [
        ("transformers-fp32", 1), ("fp32", 1), ("bf16", 3), ("int8", 1),
    ]  # fmt: skip
    # 2 layers of 4·64² + 3·64·128 weights, a head of 512·64, and 5 gains of 64, in fp32; K and V at 8 + 3 positions.
    weights = 2 * (4 * 64**2 + 3 * 64 * 128) + 512 * 64 + 5 * 64
    assert result["rows"][1]["step_bytes"] == 4 * weights + 2 * 2 * 64 * 11 * 4
    assert result["rows"][0]["step_bytes"] == result["rows"][1]["step_bytes"]
    assert all(row["decode_tokens_per_second"] > 0 for row in result["rows"])
    assert {"command", "date", "processor", "torch"} <= result["machine"].keys()


def test_lengths_and_their_picture(tmp_path):
    done = run_script(
        BENCHMARK, "decode", "--shape", "tiny", "--device", "cpu", "--lengths", "--repeats", "2", "--png", "a.png",
        cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout.splitlines()[-1])["lengths"]
    assert [row["length"] for row in rows] == [64, 128, 256, 512, 1024, 2048, 4096]
    assert rows[-1]["full_cache_bytes"] == 64 * rows[0]["full_cache_bytes"]
    assert rows[-1]["window_cache_bytes"] == rows[0]["window_cache_bytes"]
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--subjects", "fp33"], "fp33 is nothing to measure"),
        (["--new", "1"], "--new and --prompt must be at least 2"),
        (["--device", "gpu"], "the device gpu is not there"),
    ],
)
def test_mistakes(arguments, says):
    done = run_script(BENCHMARK, "decode", "--shape", "tiny", *arguments)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert says in done.stderr


def test_train_beside_transformers(tmp_path):
    done = run_script(
        BENCHMARK, "train", "--shape", "tiny", "--device", "cpu", "--precision", "fp32", "--repeats", "2",
        "--no-compile", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    names = {"thinker eager, adamw", "thinker eager, muon", "transformers eager, adamw"}
    assert result["tokens_per_second"].keys() == names
    for name in names:
        assert result["tokens_per_second"][name] == pytest.approx(4 * 32 / result["step_s"][name])
    speeds = result["tokens_per_second"]
    ratio = speeds["thinker eager, adamw"] / speeds["transformers eager, adamw"]
    assert result["ratios"] == {"thinker eager to transformers eager": pytest.approx(ratio)}


def test_head_beside_the_plain_one(tmp_path):
    done = run_script(
        BENCHMARK, "head", "--rows", "4096", "--width", "16", "--vocab", "5000", "--device", "cpu", "--precision",
        "fp32", "--repeats", "1", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["peak_bytes"]["plain"] > 2 * 4 * 4096 * 5000  # logits and their gradient
    assert result["ratios"]["memory"] < 1 / 3
