"""Commit 1071b80 and this tree compute the same to the bit, and its runs open and resume here.

Only commands and what they write are used, so the tests do not care where a module is. The same as
a table: python tests/stress/unchanged/compare.py --quick
"""

import equal_numbers
import pytest
from compare import COMMIT, RESUME, Comparison, Skipped, is_quick, name_of
from unchanged_cases import RUNS, TEXTS, TRAININGS

from thinker.benchmarks.checkout import has_commit

KEY = "removed_feature"  # of the section train, which no tree knows


@pytest.fixture(scope="module")
def comparison(tmp_path_factory):
    if not has_commit(COMMIT):
        pytest.skip(f"the history has no commit {COMMIT}: run git fetch --unshallow")
    comparison = Comparison(tmp_path_factory.mktemp("unchanged"))
    yield comparison
    comparison.close()


def params(cases):
    """Parameters of a test; those that take long run with make prove."""
    return [
        pytest.param(case, id=name_of(case), marks=() if is_quick(case) else pytest.mark.stress)
        for case in cases
    ]


@pytest.mark.parametrize("case", params([*TRAININGS, *TEXTS, RESUME, *RUNS]))
def test_equal_to_the_bit(comparison, case):
    try:
        print(f"{name_of(case)}: {comparison.compare(case)}")
    except Skipped as reason:
        pytest.skip(str(reason))


@pytest.fixture
def store(comparison, request):
    """Makes copies of an old run that have stored a value of a key that no tree knows."""

    def copy(value):
        folder = comparison.stopped_copy(request.node.name)
        equal_numbers.add_key(folder / "runs" / "small", "train", KEY, value)
        return folder

    return copy


OPENINGS = {
    "sample": ("generate.py", "runs/small", "--max-new-tokens", "4"),
    "evaluate": ("scripts/eval.py", "runs/small"),
}


@pytest.mark.stress
def test_a_stored_null_of_an_unknown_key_is_dropped(comparison, store):
    folder = store(None)
    for command in OPENINGS.values():
        done = comparison.trees.new.run(*command, cwd=folder)
        assert done.status == 0, done.stderr
    done = comparison.resume_stored(folder)
    assert done.status == 0, done.stderr
    run = folder / "runs" / "small"
    equal_numbers.compare_runs(comparison.first, run)
    assert KEY not in (run / "config.yaml").read_text()
    newest = run / "checkpoints" / "step-00000050" / "state.json"
    assert KEY not in newest.read_text()


@pytest.mark.stress
def test_a_null_in_a_checkpoint_alone_is_dropped(comparison, store):
    """The run resumes by the config that it began with, which does not have the key."""
    folder = store(None)
    done = comparison.trees.new.run("train.py", "small.yaml", "data.packing=documents", cwd=folder)
    assert done.status == 0, done.stderr
    equal_numbers.compare_runs(comparison.first, folder / "runs" / "small")


def test_a_stored_value_of_an_unknown_key_is_one_clear_line(comparison, store):
    folder = store({"strength": 3})
    evaluated = comparison.trees.new.run(*OPENINGS["evaluate"], cwd=folder)
    resumed = comparison.resume_stored(folder)
    by_state = comparison.trees.new.run(
        "train.py", "small.yaml", "data.packing=documents", cwd=folder
    )
    for done in (evaluated, resumed, by_state):
        assert done.status == 2, done.stderr
        assert done.stdout == ""
        (line,) = done.stderr.strip().splitlines()
        assert f"train.{KEY}" in line
    untouched = equal_numbers.metrics(comparison.first)
    assert equal_numbers.metrics(folder / "runs" / "small") == untouched
