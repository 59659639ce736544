"""What the tests share: real commands in real processes, and one small model that a real training made."""

import os
import subprocess
import sys
from pathlib import Path

import fork_server
import pytest
import torch

from thinker.model import Thinker, ThinkerConfig

ROOT = Path(__file__).parents[1]

# Small enough to train in a second; overrides of tests/fixtures/base.yaml.
TINY = [
    "model.d_model=32",
    "model.n_layers=2",
    "model.n_heads=2",
    "model.n_kv_heads=1",
    "data.tokenizer=bpe:300",
    "data.seq_len=32",
    "data.packing=contiguous",
    "train.batch_size=4",
    "train.max_steps=6",
    "train.max_minutes=null",
    "train.eval_every=3",
    "train.sample_every=null",
    "train.save_every=2",
    "train.precision=fp32",
    "train.device=cpu",
]


def run_script(*arguments, cwd=ROOT, timeout=120, **environment):
    """A command of ours as a user runs it. Returns the finished process with its text.

    It is forked from one that has imported torch already, unless it wants an environment of its own from the start.
    """
    arguments, everything = [str(argument) for argument in arguments], {**os.environ, "PYTHONUTF8": "1", **environment}
    if not environment and Path(arguments[0]).is_relative_to(ROOT):
        return fork_server.run(arguments, cwd, everything, timeout)
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=everything, capture_output=True, text=True, timeout=timeout
    )


def pytest_addoption(parser):
    parser.addoption("--prove", action="store_true", help="the long proofs in full: make prove")


def pytest_collection_modifyitems(config, items):
    """What is marked `prove` belongs to make prove alone."""
    if not config.getoption("--prove"):
        left_out = [item for item in items if item.get_closest_marker("prove")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture(scope="session")
def prove(request):
    """Whether proofs that take minutes run in full; a sample of each otherwise."""
    return request.config.getoption("--prove")


@pytest.fixture(autouse=True)
def denormals():
    """A test that trains or evaluates in this process sets them to zero; the next one shall find them again."""
    yield
    torch.set_flush_denormal(False)


@pytest.fixture(scope="session")
def script():
    return run_script


@pytest.fixture(scope="session")
def text_file(tmp_path_factory):
    """A little text with something to learn in it."""
    path = tmp_path_factory.mktemp("text") / "my.txt"
    path.write_text("".join(f"Line {i}: the cat number {i % 7} sat on mat number {i % 7}.\n" for i in range(600)))
    return path


@pytest.fixture(scope="session")
def tiny(text_file, tmp_path_factory):
    """Arguments of train.py for a tiny run on text_file; append run.dir=... and what differs."""
    cache = tmp_path_factory.mktemp("cache")
    data = ["data.source=text", f"data.path={text_file}", "data.max_documents=null", f"data.cache_dir={cache}"]
    return [ROOT / "train.py", ROOT / "tests" / "fixtures" / "base.yaml", *TINY, *data]


@pytest.fixture(scope="session")
def tiny_run(tiny, tmp_path_factory):
    """A run directory made by a real training of a few steps."""
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    done = run_script(*tiny, f"run.dir={folder}", "train.max_steps=40")
    assert done.returncode == 0, done.stderr
    return folder


def random_thinker(seed=0, gains=0.5, weights=0.3, **kwargs):
    """A Thinker whose every parameter matters: a fresh one has zero output projections and would hide mistakes."""
    torch.manual_seed(seed)
    shape = {"vocab_size": 61, "d_model": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "max_seq_len": 64}
    model = Thinker(ThinkerConfig(**{**shape, **kwargs}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(gains if parameter.dim() == 1 else 0, weights)
    return model.eval()


@pytest.fixture(scope="session")
def make_thinker():
    return random_thinker


@pytest.fixture(scope="module")
def one_thread():
    """For the smallest models, which are slower on two threads: they wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
