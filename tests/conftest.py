"""What the tests share: real commands in processes of their own, a tiny trained run, random
models."""

import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path

import fork_server
import pytest
import torch
from hypothesis import settings
from server_process import chat_run, served_run, server, start_server, tool_server  # noqa: F401 - fixtures

from thinker.model import Thinker, ThinkerConfig

ROOT = Path(__file__).parents[1]
in_full = False  # with --stress
# These need it before torch: see test_fake_cuda.py.
collect_ignore = [] if "fake_cuda" in sys.modules else ["fake_cuda", "sm90"]

# Overrides of tests/fixtures/base.yaml: a run that trains in a second.
TINY_OVERRIDES = [
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


def heed_signals():
    """Undo what started the tests: nohup and a shell's background jobs ignore signals, and the
    processes of tests would inherit that."""
    for name, handler in (("SIGINT", signal.default_int_handler), ("SIGHUP", signal.SIG_DFL)):
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, handler)


heed_signals()


def run_script(*args, cwd=ROOT, timeout=600, input="", **variables):
    """Run a script as a user does, with these environment variables and this input; returns its
    status and output.

    Our own scripts are forked from a process that has imported torch already. `timeout` only guards
    against hanging.
    """
    args, environment = (
        [str(argument) for argument in args],
        {**os.environ, "PYTHONUTF8": "1", **variables},
    )
    script = Path(cwd, args[0])
    if script.is_relative_to(ROOT) and script.suffix == ".py":
        args[0] = str(script)
        return fork_server.run_script(args, cwd, environment, timeout, input)
    command = [sys.executable, *args]
    return subprocess.run(
        command,
        cwd=cwd,
        env=environment,
        input=input,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def start_script(*args, **options):
    """Start one of our scripts and return at once, with a fork_server.ForkedCommand."""
    return fork_server.ForkedCommand(args, **options)


def pytest_addoption(parser):
    parser.addoption(
        "--stress", action="store_true", help="run the stress tests in full, as make prove does"
    )


def pytest_configure(config):
    global in_full
    in_full = config.getoption("--stress")
    # No deadline: a busy machine is no failure. The same examples every time, and new ones with
    # --stress.
    settings.register_profile(
        "thinker", deadline=None, max_examples=examples(100), derandomize=not in_full
    )
    settings.load_profile("thinker")


def examples(number):
    """How many examples hypothesis tries: this many with --stress, a third of them otherwise."""
    return number if in_full else number // 3


# The tests of `make test-more`: lessons, pages in a browser, documentation commands, benchmarks,
# products of options. A path names a file, or a folder with all its files.
MORE = (
    "commands/test_benchmark_command.py",
    "commands/test_gpu_benchmark.py",
    "features/pruning/test_pruned_report.py",
    "features/sweeps/test_tune_command.py",
    "features/run_report/test_run_report_page.py",
    "generation/test_attention_variants_sampling.py",
    "generation/test_option_matrix.py",
    "interpretability/test_html_report.py",
    "interpretability/test_html_report_variants.py",
    "interpretability/test_transformer_lens.py",
    "interpretability/test_transformer_lens_families.py",
    "lessons",
    "serving/test_langchain.py",
    "serving/test_many_clients.py",
    "serving/test_lm_eval.py",
    "serving/test_playground.py",
    "serving/test_playground_access.py",
    "serving/test_playground_chat.py",
    "serving/test_playground_visits.py",
    "serving/test_pydantic_ai.py",
    "test_docs.py",
    "test_fake_cuda.py",
    "training/test_training_options.py",
)


def is_in_more(path):
    """Whether a test file belongs to `make test-more`."""
    within = path.relative_to(ROOT / "tests")
    return any(within.is_relative_to(name) for name in MORE)


def pytest_collection_modifyitems(config, items):
    """Mark the tests of `make test-more`. Without --stress, deselect what is marked `stress`."""
    for item in items:
        if is_in_more(item.path):
            item.add_marker("more")
    if not config.getoption("--stress"):
        deselected = [item for item in items if item.get_closest_marker("stress")]
        config.hook.pytest_deselected(items=deselected)
        items[:] = [item for item in items if item not in deselected]


@pytest.fixture(scope="session", autouse=True)
def no_neighbours_of_the_clone():
    """pytest imports the clone's __init__.py from the folder around it, whose files would then be
    importable."""
    sys.path[:] = [path for path in sys.path if path != str(ROOT.parent)]


@pytest.fixture(scope="session")
def stress(request):
    """Whether stress tests run in full, for minutes; a sample of each otherwise."""
    return request.config.getoption("--stress")


@pytest.fixture
def quickly_compiled(monkeypatch, stress):
    """Without --stress, Inductor writes kernels without vector instructions, which compile in half
    the time.

    It must not find those of a run with --stress in its cache, whose keys do not tell them apart.
    """
    if not stress:
        import torch._inductor.cpu_vec_isa
        from torch._inductor.runtime.cache_dir_utils import default_cache_dir

        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", f"{default_cache_dir()}_quick")
        monkeypatch.setattr(torch._inductor.cpu_vec_isa, "valid_vec_isa_list", list)


@pytest.fixture(autouse=True)
def reset_flush_denormal():
    """Undo what a test that trains or evaluates in this process sets: denormal numbers become
    zero."""
    yield
    torch.set_flush_denormal(False)


@pytest.fixture(autouse=True)
def kill_forked_commands():
    """A test that fails leaves no training running."""
    yield
    for process in multiprocessing.active_children():
        process.kill()


@pytest.fixture(scope="session", name="run_script")
def run_script_fixture():
    return run_script


@pytest.fixture(scope="session")
def text_file(tmp_path_factory):
    """A small text with something to learn in it."""
    path = tmp_path_factory.mktemp("text") / "my.txt"
    path.write_text(
        "".join(
            f"Line {i}: the cat number {i % 7} sat on mat number {i % 7}.\n" for i in range(600)
        )
    )
    return path


@pytest.fixture(scope="session")
def train_args(text_file, tmp_path_factory):
    """train.py with the arguments of a tiny run on text_file; append run.dir=... and other
    overrides."""
    cache = tmp_path_factory.mktemp("cache")
    data = [
        "data.source=text",
        f"data.path={text_file}",
        "data.max_documents=null",
        f"data.cache_dir={cache}",
    ]
    return [ROOT / "train.py", ROOT / "tests" / "fixtures" / "base.yaml", *TINY_OVERRIDES, *data]


@pytest.fixture(scope="session")
def tiny_run(train_args, tmp_path_factory):
    """The run directory of a real training of 40 steps."""
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    done = run_script(*train_args, f"run.dir={folder}", "train.max_steps=40")
    assert done.returncode == 0, done.stderr
    return folder


def random_model(seed=0, norm_mean=0.5, std=0.3, **options):
    """A model whose every parameter is random; a fresh one has zero output projections, which would
    hide mistakes."""
    torch.manual_seed(seed)
    shape = {
        "vocab_size": 61,
        "d_model": 32,
        "n_layers": 2,
        "n_heads": 4,
        "n_kv_heads": 2,
        "max_seq_len": 64,
    }
    model = Thinker(ThinkerConfig(**{**shape, **options}))
    with torch.no_grad():
        for parameter in model.parameters():
            is_norm_weight = parameter.dim() == 1
            parameter.normal_(norm_mean if is_norm_weight else 0, std)
    return model.eval()


@pytest.fixture(scope="session", name="random_model")
def random_model_fixture():
    return random_model


@pytest.fixture(scope="module")
def one_thread():
    """One thread for the smallest models, which are slower on two."""
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(n_threads)
