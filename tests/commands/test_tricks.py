"""The benchmark of tricks: how long its runs are, and a run of it."""

import argparse
import json

import pytest
import yaml

from thinker.benchmarks.losses import tricks
from thinker.benchmarks.losses.tricks import DEFAULTS, Cost, relative_time, run_lengths, saved_costs


def test_runs_of_equal_time_and_of_equal_tokens():
    # The defaults need 10 s before the first step, and 0.5 s for each. The trick's steps take twice
    # as long in each round, but for one.
    costs = {DEFAULTS: Cost(10.0, [0.5, 0.5, 1.0]), "trick": Cost(0.0, [1.0, 9.0, 2.0])}
    assert relative_time(costs, "trick") == 2
    assert run_lengths(costs, DEFAULTS, 110.0, 1.0) == {"time": 200, "tokens": 200}
    assert run_lengths(costs, "trick", 110.0, 1.0) == {"time": 110, "tokens": 200}
    assert run_lengths(costs, "trick", 110.0, 0.5) == {"time": 110, "tokens": 400}


def test_costs_are_measured_again_only_for_new_tricks(monkeypatch, tmp_path):
    measured = []

    def measure(text, size, names, rounds, seconds):
        measured.append(names)
        return {name: Cost(len(measured), [0.5, 0.25]) for name in names}

    monkeypatch.setattr(tricks, "measure_costs", measure)
    arguments = argparse.Namespace(folder=tmp_path / "runs", size="2m", rounds=2)
    first = saved_costs(arguments, "tales", [DEFAULTS, "a"], 60.0)
    assert saved_costs(arguments, "tales", [DEFAULTS, "a"], 60.0) == first
    assert saved_costs(arguments, "tales", [DEFAULTS], 60.0) == {DEFAULTS: first[DEFAULTS]}
    assert measured == [[DEFAULTS, "a"]]
    assert saved_costs(arguments, "tales", [DEFAULTS, "b"], 60.0)["b"].start == 2
    saved_costs(arguments, "tales", [DEFAULTS, "a"], 30.0)
    assert len(measured) == 3


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--seeds", "0"),
        ("--rounds", "0"),
        ("--jobs", "0"),
        ("--seconds", "-3"),
        ("--seconds", "nan"),
    ],
)
def test_numbers_that_are_refused(run_script, flag, value):
    done = run_script("scripts/benchmark.py", "tricks", flag, value)
    assert done.returncode == 2
    assert f"{flag} is {float(value):g}" in done.stderr.replace(".0", "")


@pytest.mark.more
def test_a_short_comparison(run_script, tmp_path):
    out = tmp_path / "tricks.jsonl"
    run_script(
        "scripts/benchmark.py", "tricks", "--seconds", "2", "--seeds", "2", "--rounds", "1",
        "--only", "no fit to pairs", "--texts", "tales", "--jobs", "2",
        "--folder", tmp_path / "runs", "--out", out,
    )  # fmt: skip
    [line] = map(json.loads, out.read_text().splitlines())
    default, other = line["rows"]
    assert default["trick"] == DEFAULTS
    assert default["time"]["difference"] == 0
    for budget in ("time", "tokens"):
        losses = other[budget]["losses"]
        differences = [a - b for a, b in zip(losses, default["time"]["losses"])]
        assert other[budget]["difference"] == pytest.approx(sum(differences) / 2)
    trained = [yaml.safe_load(path.read_text()) for path in tmp_path.glob("runs/*/config.yaml")]
    assert {line["precision"]} == {config["train"]["precision"] for config in trained}
