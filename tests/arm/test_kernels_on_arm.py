"""The kernels in C pass their tests on ARM: cross-compiled, on an emulated processor."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT
from emulated_library import COMPILER, missing_tools

from thinker.native.compiler import optimization_flag

MISSING = missing_tools()
HERE = Path(__file__).parent
pytestmark = pytest.mark.skipif(
    bool(MISSING), reason=f"needs {', '.join(MISSING)} (Debian: gcc-aarch64-linux-gnu qemu-user)"
)
TESTS = [
    "tests/native/test_operations.py",
    "tests/native/test_training_kernels.py",
    "tests/training/test_muon.py",
    "tests/generation/test_native_decode.py",
    "tests/generation/test_quantized_cache.py",
]
# Those that compile for this machine, or start a process that does.
NOT_ON_ARM = "not again and not compiled_program"
# A few of each file, so that every function is called.
QUICK = (
    "products or sampling or norm or heads or swiglu or test_dropout or fused_updates_are"
    " or one_call or 1e-45-True or (logits_and_cache and mqa) or (rounded_forms and gqa)"
    " or (read_the_same_cache and gqa and dtype0)"
)
NOT_QUICK = "probability or rows_are_normalized or rows_are_divided"


def run_on_arm(folder, flags, *arguments):
    """Run tests with kernels compiled with these flags, and return what the tests print."""
    command = [sys.executable, HERE / "run_tests_on_arm.py", folder, ",".join(flags)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, *TESTS, "-o", "addopts=", "-q", "-x", *arguments],
        cwd=ROOT, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    return done.stdout


def exported(library):
    """The functions that a compiled library offers."""
    command = [COMPILER.replace("-gcc", "-nm"), "-D", "--defined-only", library]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {line.split()[2] for line in listed.splitlines() if line.split()[1] == "T"}


def check_that_all_ran(output, folder):
    """Every function of every file of native/ was called: a new one needs a test that runs here."""
    called = {line.split()[1] for line in output.splitlines() if line.startswith("called ")}
    for source in (ROOT / "native").glob("*.c"):
        functions = exported(folder / f"{source.name}.so")
        assert functions
        assert functions <= called, functions - called


@pytest.mark.more
def test_a_few_tests_of_each_kernel(tmp_path):
    chosen = f"({QUICK}) and {NOT_ON_ARM} and not ({NOT_QUICK})"
    output = run_on_arm(tmp_path, ["-O1", "-march=armv8-a"], "-k", chosen)
    check_that_all_ran(output, tmp_path)


@pytest.mark.stress
@pytest.mark.parametrize("march", ["armv8-a", "armv9-a"], ids=["neon", "sve2"])
def test_all_tests_of_the_kernels(march, tmp_path):
    """With the flags of native/compiler.py, but for the processor and the emulated threads."""
    optimization = optimization_flag(COMPILER, "aarch64")
    output = run_on_arm(tmp_path, [optimization, f"-march={march}"], "-k", NOT_ON_ARM)
    check_that_all_ran(output, tmp_path)


@pytest.mark.more
def test_a_kernel_that_reads_beyond_its_memory_is_found(tmp_path):
    """Also where this process would crash."""
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from emulated_library import EmulatedLibrary\n"
        "signatures = {'swiglu': 'piiipi'}\n"
        "library = EmulatedLibrary('train.c', signatures, ['-O1'], Path(sys.argv[1]))\n"
        "library.swiglu(4096, 0, 1, 4, 4096, 1)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(HERE)}
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path], env=environment, capture_output=True, text=True
    )
    assert "swiglu() touches 0x1000, where nothing is" in done.stderr
