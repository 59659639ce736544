"""The kernels are compiled once, and without a compiler decoding still works and says what is
missing."""

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec

import pytest

from thinker.native.compiler import (
    COMPILERS,
    FOLDER,
    has_compiler,
    machine_flags,
    optimization_flag,
)

pytestmark = pytest.mark.skipif(not has_compiler(), reason="needs a C compiler")
CODE = """
import torch
from thinker.native.compiler import load_library
from thinker.runtime.errors import UserError
try:
    load_library()
    print("loaded")
except UserError as error:
    print(error)
"""
GENERATE = """
import torch
from thinker import Generator, SamplingParams, Thinker, ThinkerConfig
from thinker.data.tokenizers.tokenizer_factory import make_tokenizer
tokenizer = make_tokenizer("byte", [])
model = Thinker(ThinkerConfig(vocab_size=tokenizer.vocab_size, d_model=32, n_layers=1, n_heads=2)).eval()
for bits in (None, 8, 4):
    generator = Generator(model, tokenizer, bits=bits)
    generator.generate("a", SamplingParams(max_new_tokens=3))
print(generator.kernel_problem)
"""


@pytest.fixture(autouse=True)
def fast_compiler(tmp_path_factory, monkeypatch):
    """The machine's compiler without optimization, which takes a tenth of the time."""
    path = tmp_path_factory.mktemp("compiler") / "cc"
    found = os.environ.get("CC") or next(filter(None, map(shutil.which, COMPILERS)))
    path.write_text(f'#!/bin/sh\nexec {found} "$@" -O0 -w\n')
    path.chmod(0o755)
    monkeypatch.setenv("CC", str(path))


def run(code, folder, **environment):
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder), **environment}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def libraries(folder):
    return sorted((folder / "thinker" / "kernels").glob("*.so"))


def test_compiled_once_and_again_after_damage(tmp_path):
    assert run(CODE, tmp_path) == "loaded"
    (path,) = libraries(tmp_path)
    changed = path.stat().st_mtime_ns
    assert run(CODE, tmp_path) == "loaded"
    assert path.stat().st_mtime_ns == changed
    path.write_bytes(path.read_bytes()[:1000])
    assert run(CODE, tmp_path) == "loaded"
    assert max(library.stat().st_size for library in libraries(tmp_path)) > 1000


def test_processes_that_start_together(tmp_path):
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", CODE], env=environment, stdout=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    assert [process.communicate()[0].strip() for process in processes] == ["loaded"] * 3
    assert len(list((tmp_path / "thinker" / "kernels").iterdir())) == len(
        libraries(tmp_path)
    )  # no temporary file


def test_without_a_compiler_torch_decodes(tmp_path):
    assert run(GENERATE, tmp_path, PATH="", CC="") == "no C compiler found (gcc, clang, cc)"
    assert (
        run(GENERATE, tmp_path, CC="no-such-compiler") == "no C compiler found (no-such-compiler)"
    )


def test_a_compiler_that_fails_is_reported_in_one_line(tmp_path):
    broken = tmp_path / "broken-cc"
    broken.write_text("#!/bin/sh\necho 'x.c:1: fatal error: stop' >&2\necho more >&2\nexit 1\n")
    broken.chmod(0o755)
    problem = run(GENERATE, tmp_path, CC=str(broken))
    assert problem == f"{broken} cannot compile the kernels: x.c:1: fatal error: stop"
    insisting = GENERATE.replace("bits=bits)", "bits=bits, compile=True)")
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "CC": str(broken)}
    done = subprocess.run(
        [sys.executable, "-c", insisting], env=environment, capture_output=True, text=True
    )
    last = done.stderr.splitlines()[-1]
    assert (
        last
        == f"thinker.runtime.errors.UserError: compile is not available: {problem}; use compile=False"
    )


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "thinker").write_text("a file where the folder belongs")
    assert run(CODE, tmp_path) == "loaded"
    assert run(CODE, tmp_path, HOME="/nonexistent", XDG_CACHE_HOME="") == "loaded"


def test_flags_for_the_processor_and_for_threads():
    assert machine_flags("Linux", "x86_64") == ("-march=native", "-fopenmp")
    assert machine_flags("Linux", "aarch64") == ("-mcpu=native", "-fopenmp")
    assert machine_flags("Darwin", "arm64") == ("-mcpu=native", "-fopenmp-simd")
    assert machine_flags("Darwin", "x86_64") == ("-march=native", "-fopenmp-simd")


@pytest.mark.parametrize("name", ["gcc", "aarch64-linux-gnu-gcc", "clang"])
def test_gcc_optimizes_less_on_arm(name):
    """Where -O3 takes it minutes."""
    compiler = shutil.which(name)
    if compiler is None:
        pytest.skip(f"needs {name}")
    described = subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout
    on_arm = "-O3" if "clang" in described else "-O2"  # on a Mac, gcc is clang
    assert optimization_flag(compiler, "aarch64") == on_arm
    assert optimization_flag(compiler, "arm64") == on_arm
    assert optimization_flag(compiler, "x86_64") == "-O3"


@pytest.mark.skipif(find_spec("ziglang") is None, reason="needs pip install ziglang")
def test_clang_optimizes_fully_on_arm(tmp_path):
    compiler = tmp_path / "cc"
    compiler.write_text(f'#!/bin/sh\nexec {sys.executable} -m ziglang cc "$@"\n')
    compiler.chmod(0o755)
    assert optimization_flag(str(compiler), "aarch64") == "-O3"


def test_the_flags_that_a_compiler_gets(tmp_path):
    """On this machine, and as on ARM."""
    real = os.environ["CC"]
    spy = tmp_path / "spy-cc"
    spy.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\nexec {real} "$@"\n')
    spy.chmod(0o755)
    as_on_arm = "import platform\nplatform.machine = lambda: 'aarch64'\n"
    run(CODE, tmp_path, CC=str(spy))
    run(as_on_arm + CODE, tmp_path, CC=str(spy))
    calls = (tmp_path / "calls").read_text().splitlines()
    compilations = [call for call in calls if "decode.c" in call]
    assert [call.split()[0] for call in compilations] == ["-O3", "-O2"]


def test_on_windows_torch_decodes_whatever_is_installed(tmp_path):
    as_on_windows = "import platform\nplatform.system = lambda: 'Windows'\n"
    assert run(as_on_windows + GENERATE, tmp_path) == (
        "the kernels in C run on Linux and macOS, on Windows only in WSL"
    )
    assert libraries(tmp_path) == []


@pytest.mark.skipif(find_spec("ziglang") is None, reason="needs pip install ziglang")
@pytest.mark.parametrize("machine", ["arm64", "x86_64"])
@pytest.mark.parametrize("source", ["decode.c", "train.c"])
def test_clang_builds_the_kernels_for_macs(source, machine, tmp_path):
    """With the flags of a Mac, but for the processor."""
    library = tmp_path / "kernels.dylib"
    flags = [machine_flags("Darwin", machine)[1], "-O1", "-shared", "-fPIC", "-std=gnu11", "-Wall"]
    target = ["-target", {"arm64": "aarch64"}.get(machine, machine) + "-macos"]
    command = [sys.executable, "-m", "ziglang", "cc", *target, *flags, "-o", library]
    done = subprocess.run(
        [*command, FOLDER / source, "-lm"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert library.read_bytes()[:4] == bytes.fromhex("cffaedfe")  # a Mach-O file of 64 bits
