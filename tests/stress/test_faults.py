"""Every file operation and every large allocation of a training fails once; power fails; bytes on
the disk change.

Each of these ends in one line or is healed, and the next start of the same command ends at the same
bits. All of them with make prove, a sample otherwise.
"""

import errno
import random
import shutil
import sys

import pytest
from conftest import ROOT, TINY_OVERRIDES
from faults import Faults
from power_loss import crash, read_record
from training_runs import assert_same_run, assert_same_tensors, temporary_files

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("gcc") is None, reason="needs Linux, glibc and gcc"
)

ERRNOS = [errno.EIO, errno.ENOSPC, errno.EACCES, errno.ESTALE, errno.EBUSY]
STEPS = 4
OPTIONS = [
    "data.tokenizer=byte",
    "data.source=text",
    "data.max_documents=null",
    "train.keep_last=1",
]
OPTIONS += [f"train.max_steps={STEPS}", "train.save_every=2", "train.eval_every=2"]
SMALL = ["model.d_model=16", "model.n_layers=1"]
LARGE = [
    "model.d_model=128",
    "model.n_layers=1",
    "train.batch_size=32",
    "data.seq_len=128",
]  # allocates megabytes
MEGABYTE = 1 << 20


@pytest.fixture(scope="module")
def faults(tmp_path_factory):
    faults = Faults(tmp_path_factory.mktemp("library"))
    yield faults
    faults.close()


class Case:
    """A training in a folder of its own, always the same one, because checkpoints name it; and how
    it should end."""

    def __init__(self, faults, base, text_file, options, min_bytes=0):
        self.faults, self.place, self.min_bytes = faults, base / "place", min_bytes
        self.log, self.whole, self.stopped = base / "log", base / "whole", base / "stopped"
        options = [
            *TINY_OVERRIDES,
            *OPTIONS,
            *options,
            f"data.path={text_file}",
            f"run.dir={self.place / 'run'}",
        ]
        config = ROOT / "tests/fixtures/base.yaml"
        self.command = [
            ROOT / "train.py",
            config,
            *options,
            f"data.cache_dir={self.place / 'cache'}",
        ]
        done = self.run(log=self.log)
        assert done.status == 0, done.stderr
        self.n_calls = done.n_calls
        self.place.rename(self.whole)
        if min_bytes:
            return
        self.operations = read_record(self.log)
        last = next(
            i for i, (_, path, *_) in enumerate(self.operations) if ".step-00000004" in path
        )
        crash(
            self.operations, self.place, last, shares=[1.0]
        )  # as it was before the last checkpoint was begun
        self.place.rename(self.stopped)
        shutil.copytree(self.stopped, self.place)
        self.n_resumed = self.run().n_calls
        self.check()

    def run(self, number=0, error=0, log=""):
        return self.faults.run(self.command, self.place, number, error, self.min_bytes, log)

    def clear(self, start=None):
        """Let the folder hold what `start` holds, by default nothing."""
        shutil.rmtree(self.place, ignore_errors=True)
        if start is not None:
            shutil.copytree(start, self.place)

    def check(self):
        """A start without faults ends well, at the same bits, and leaves nothing behind."""
        done = self.run()
        assert done.status == 0, done.stderr
        assert_same_run(self.whole / "run", self.place / "run", STEPS)
        assert temporary_files(self.place / "run") == []
        assert [
            path.name
            for path in (self.place / "cache/tokens").iterdir()
            if "building" not in path.name
        ]

    def fail(self, number, error, start=None):
        self.clear(start)
        outcome = self.run(number, error)
        assert outcome.is_clean, (number, errno.errorcode[error], outcome.status, outcome.stderr)
        self.check()


@pytest.fixture(scope="module", params=["false", pytest.param("true", marks=pytest.mark.stress)])
def case(faults, tmp_path_factory, text_file, request):
    """With saves in the foreground, and in the background."""
    options = [*SMALL, f"train.async_save={request.param}"]
    return Case(faults, tmp_path_factory.mktemp("case"), text_file, options)


def sample(values, number, stress):
    """All values, with make prove; otherwise some."""
    values = list(values)
    return values if stress else random.Random(number).sample(values, number)


def test_a_file_operation_fails(case, stress):
    """Each one of a new run and of a resumed one."""
    calls = [(None, number) for number in range(1, case.n_calls + 1)]
    calls += [(case.stopped, number) for number in range(1, case.n_resumed + 1)]
    for start, number in sample(calls, 6, stress):
        for error in ERRNOS if stress else ERRNOS[number % 5 :][:1]:
            case.fail(number, error, start)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_an_allocation_fails(faults, tmp_path, text_file, stress, optimizer):
    case = Case(faults, tmp_path, text_file, [*LARGE, f"optimizer.name={optimizer}"], MEGABYTE)
    for number in sample(range(1, case.n_calls + 1), 3, stress):
        case.fail(number, errno.ENOMEM)


def test_the_power_fails(case, stress):
    kinds = {kind for kind, *_ in case.operations}
    assert {"create", "write", "sync", "rename", "remove", "mkdir"} <= kinds
    for number in sample(range(len(case.operations) + 1), 6, stress):
        for seed in range(5 if stress else 1):
            case.clear()
            crash(case.operations, case.place, number, seed)
            case.check()


def test_a_byte_changes(case, stress):
    """Of every file of a run that is stopped, and of the token cache."""
    files = sorted(
        path.relative_to(case.stopped) for path in case.stopped.rglob("*") if path.is_file()
    )
    files = [file for file in files if (case.stopped / file).stat().st_size]
    assert {"model.safetensors", "state.json", "corpus.json", "config.yaml"} <= {
        file.name for file in files
    }
    rng = random.Random(0)
    for file in files:
        for _ in range(20 if stress else 1):
            case.clear(case.stopped)
            content = bytearray((case.place / file).read_bytes())
            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
            (case.place / file).write_bytes(content)
            outcome = case.run()
            assert outcome.is_clean, (file, outcome.stderr)
            if (
                outcome.status == 0 and file.name == "metrics.jsonl"
            ):  # a log, of which only whole lines are read
                assert_same_tensors(case.whole / "run", case.place / "run", STEPS)
            elif outcome.status == 0:
                case.check()
            else:  # there is no older checkpoint to resume from, or it seems to be of another version
                assert (
                    "all checkpoints in" in outcome.stderr or "checkpoint format" in outcome.stderr
                ), outcome.stderr
                assert file.parts[1] == "checkpoints", file
