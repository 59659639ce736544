"""Any access to a file of the run may fail: the training ends in one line, and the same command heals it."""

import errno
import os

import fork_server
import pytest
from conftest import ROOT
from training_runs import assert_same_tensors, checkpoint_steps

STEPS = 4
FAIL = """
import os, runpy, sys

folder, number, code, counted = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
sys.argv = sys.argv[5:]
events = 0


def fail(event, arguments):
    global events
    if event != "open" and event[:3] != "os.":
        return
    path = next((str(each) for each in arguments if isinstance(each, (str, os.PathLike)) and folder in str(each)), None)
    if path is None:
        return
    events += 1
    if events == number:
        raise OSError(code, os.strerror(code), path)


sys.addaudithook(fail)
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    here, folder = open(counted, "w"), "\\0"
    here.write(str(events))
    here.close()
"""
CODES = [errno.EIO, errno.EACCES, errno.ESTALE, errno.EROFS, errno.EBUSY, errno.EFBIG, errno.ENAMETOOLONG]


@pytest.mark.parametrize("background", ["false", pytest.param("true", marks=pytest.mark.stress)])
def test_an_access_that_fails_ends_as_one_line(train_args, tmp_path, stress, background):
    """With --stress each access of a training of four steps in turn; a few of them otherwise."""
    script, counted = tmp_path / "fail.py", tmp_path / "counted"
    script.write_text(FAIL)
    options = [f"train.max_steps={STEPS}", "train.eval_every=3", f"train.async_save={background}"]

    def train(run, number):
        code = CODES[number % len(CODES)]
        command = [script, run, number, code, counted, *train_args, f"run.dir={run}", *options]
        return fork_server.run_script([str(each) for each in command], ROOT, dict(os.environ), 600)

    whole = tmp_path / "whole"
    assert train(whole, -1).returncode == 0
    n_events = int(counted.read_text())
    assert n_events > 50
    for number in range(1, n_events + 1, 1 if stress else n_events // 3):
        run = tmp_path / str(number)
        failed = train(run, number)
        lines = failed.stderr.splitlines()
        assert "Traceback" not in failed.stderr, (number, failed.stderr)
        assert failed.returncode in (0, 1, 2), (number, failed.stderr)
        errors = [line for line in lines if line.startswith("error: ")]
        assert len(errors) == (failed.returncode != 0), (number, failed.stderr)
        again = train(run, -1)
        assert again.returncode == 0, (number, again.stderr)
        assert checkpoint_steps(run)[-1] == STEPS
        assert_same_tensors(whole, run, STEPS)
