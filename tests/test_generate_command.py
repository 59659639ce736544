"""generate.py as a user meets it. Every test starts the real command."""

import json
import math
import subprocess
import sys

import pytest
from conftest import ROOT, run_script

GENERATE = ROOT / "generate.py"


def test_text_to_standard_output_everything_else_to_standard_error(tiny_run):
    done = run_script(GENERATE, tiny_run, "--prompt", "Line 7", "--max-new-tokens", "12")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Line 7")
    assert len(done.stdout) > len("Line 7\n")
    assert done.stderr.startswith("seed ")


def test_a_seed_repeats_the_text_and_no_cache_changes_nothing(tiny_run):
    texts = [
        run_script(GENERATE, tiny_run, "--prompt", "Line", "--seed", "5", "--max-new-tokens", "20", *more).stdout
        for more in ([], ["--no-cache"], ["--precision", "fp32", "--device", "cpu"])
    ]
    assert texts[0] == texts[1] == texts[2]
    other = run_script(GENERATE, tiny_run, "--prompt", "Line", "--seed", "6", "--max-new-tokens", "20").stdout
    assert other != texts[0]


def test_json_has_one_object_a_sample_with_a_seed_that_repeats_it(tiny_run):
    common = [GENERATE, tiny_run, "--prompt", "Line", "--max-new-tokens", "9", "--json"]
    done = run_script(*common, "--num-samples", "3", "--seed", "4")
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["seed"] for row in rows] == [4, 5, 6]
    for row in rows:
        assert row.keys() == {"prompt", "text", "token_ids", "logprobs", "finish_reason", "seed"}
        assert len(row["token_ids"]) == len(row["logprobs"]) <= 9
        assert all(-math.inf < value <= 0 for value in row["logprobs"])
    alone = json.loads(run_script(*common, "--seed", "6").stdout)
    assert alone["token_ids"] == rows[2]["token_ids"]


def test_samples_are_set_apart_and_a_stop_string_ends_each(tiny_run):
    done = run_script(GENERATE, tiny_run, "--prompt", "Line", "--num-samples", "2", "--stop", "\n", "--greedy")
    assert done.returncode == 2  # greedy has one answer
    done = run_script(GENERATE, tiny_run, "--prompt", "Line", "--num-samples", "2", "--stop", "\n", "--seed", "1")
    first, second = done.stdout.split("\n\n---\n\n")
    assert first.startswith("Line")
    assert second.startswith("Line")
    assert first.strip().count("\n") == second.strip().count("\n") == 0


def test_greedy_is_temperature_zero(tiny_run):
    common = [GENERATE, tiny_run, "--prompt", "Line", "--max-new-tokens", "15"]
    assert run_script(*common, "--greedy").stdout == run_script(*common, "--temperature", "0", "--seed", "9").stdout


def test_the_best_checkpoint_and_a_checkpoint_by_path(tiny_run):
    best = next((tiny_run / "checkpoints").glob("best-*"))
    common = ["--prompt", "Line", "--greedy", "--max-new-tokens", "15"]
    by_name = run_script(GENERATE, tiny_run, "--checkpoint", "best", *common)
    by_path = run_script(GENERATE, best, *common)
    assert by_name.returncode == by_path.returncode == 0
    assert by_name.stdout == by_path.stdout


def test_text_appears_while_it_is_made(tiny_run):
    process = subprocess.Popen(
        [sys.executable, GENERATE, tiny_run, "--prompt", "Line 1", "--max-new-tokens", "25", "--seed", "1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdout.read(6) == b"Line 1"
    assert process.stdout.read(1)
    assert process.wait(timeout=60) == 0


def test_a_reader_that_leaves(tiny_run):
    process = subprocess.Popen(
        [sys.executable, GENERATE, tiny_run, "--num-samples", "200", "--max-new-tokens", "25", "--seed", "1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    process.stdout.read(10)
    process.stdout.close()
    said = process.stderr.read().decode()
    assert process.wait(timeout=60) == 1
    assert "Traceback" not in said
    assert "Exception" not in said


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--temperature", "-1"], "temperature is -1.0; it must be 0"),
        (["--top-p", "0"], "top_p is 0.0"),
        (["--top-k", "0"], "top_k is 0"),
        (["--min-p", "2"], "min_p is 2.0"),
        (["--repetition-penalty", "0"], "repetition_penalty is 0.0"),
        (["--max-new-tokens", "0"], "max_new_tokens is 0"),
        (["--num-samples", "0"], "--num-samples is 0"),
        (["--stop", ""], "stop string is empty"),
        (["--device", "gpu"], "the device gpu is not there; this machine has:"),
        (["--checkpoint", "newest"], "has no checkpoint newest; there are: step-"),
        (["--prompt", "word " * 100], "the model's context is 32; shorten it to at most 31 tokens"),
        (["--temprature", "1"], "unrecognized arguments"),
        (["--precision", "fp8"], "invalid choice"),
    ],
)
def test_mistakes(tiny_run, arguments, says):
    done = run_script(GENERATE, tiny_run, *arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert says in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("kind", ["nowhere", "empty folder", "file"])
def test_a_path_that_is_no_run(tmp_path, kind):
    path = tmp_path / "thing"
    if kind == "empty folder":
        path.mkdir()
    if kind == "file":
        path.write_text("hello")
    done = run_script(GENERATE, path)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {path} ")
    assert len(done.stderr.splitlines()) == 1
