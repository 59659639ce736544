"""The benchmark of tricks: how long its runs are, and a run of it."""

import json

import pytest

from thinker.benchmarks.losses.tricks import DEFAULTS, Cost, relative_time, run_lengths


def test_runs_of_equal_time_and_of_equal_tokens():
    # The defaults need 10 s before the first step, and 0.5 s for each. The trick's steps take twice
    # as long in each round, but for one.
    costs = {DEFAULTS: Cost(10.0, [0.5, 0.5, 1.0]), "trick": Cost(0.0, [1.0, 9.0, 2.0])}
    assert relative_time(costs, "trick") == 2
    assert run_lengths(costs, DEFAULTS, 110.0, 1.0) == {"time": 200, "tokens": 200}
    assert run_lengths(costs, "trick", 110.0, 1.0) == {"time": 110, "tokens": 200}
    assert run_lengths(costs, "trick", 110.0, 0.5) == {"time": 110, "tokens": 400}


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
