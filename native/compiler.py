"""Compile the kernels with the C compiler of this machine, once, and load them."""

import ctypes
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import torch  # first, so that the library shares torch's OpenMP threads

from thinker.runtime.errors import UserError

FOLDER = Path(__file__).parent
ARM = ("arm64", "aarch64")  # as platform.machine() names it


def machine_flags(system: str, machine: str) -> tuple[str, str]:
    """The flags for this processor and for threads, by platform.system() and platform.machine()."""
    cpu = "-march=native"
    if machine in ARM:
        cpu = "-mcpu=native"  # clang does not know the other one on ARM
    threads = "-fopenmp"
    if system == "Darwin":
        # Apple's clang has no OpenMP, and another clang would bring a second one into the process,
        # which ends it. So the kernels run on one thread.
        threads = "-fopenmp-simd"
    return cpu, threads


@cache
def optimization_flag(compiler: str, machine: str) -> str:
    """How hard this compiler tries, for a processor as platform.machine() names it."""
    if machine in ARM and _is_gcc(compiler):
        # GCC 12 compiles decode.c for ARM in 19 s, and with -O3 had not finished after 118 s. On
        # x86, GCC needs seconds for -O3, as clang does everywhere.
        return "-O2"
    return "-O3"


def _is_gcc(compiler: str) -> bool:
    """Whether it is GCC, whatever its name: on a Mac, gcc is clang, and cc may be either."""
    done = subprocess.run([compiler, "--version"], capture_output=True, text=True, errors="replace")
    return "Free Software Foundation" in done.stdout


SYSTEM = platform.system()
FLAGS = (*machine_flags(SYSTEM, platform.machine()), "-shared", "-fPIC", "-std=gnu11")
COMPILERS = ("gcc", "clang", "cc")
CPU_INFO = Path("/proc/cpuinfo")
TYPES = {"p": ctypes.c_void_p, "i": ctypes.c_int64, "d": ctypes.c_double}
# By function of decode.c, a letter of TYPES for each argument.
SIGNATURES = {
    "run": "pipi",
    "sample": "piiippppppp",
    "sample_steps": "pippipiipppppi",
    "log_probs": "piiipp",
    "max_rows": "",
}


@cache
def load_library() -> ctypes.CDLL:
    """The compiled decode.c.

    Raises UserError with the reason if this machine cannot compile or load it.
    """
    library = compiled("decode.c", SIGNATURES)
    library.max_rows.restype = ctypes.c_int64
    return library


def compiled(source: str, signatures: Mapping[str, str], *flags: str) -> ctypes.CDLL:
    """A compiled file of this folder.

    `signatures`: by function, a letter of TYPES for each argument. `flags`: of the compiler, after
    FLAGS. Raises UserError as load_library() does.
    """
    compiler = _find_compiler()
    try:
        optimization = optimization_flag(compiler, platform.machine())
        path = _find_or_compile(compiler, FOLDER / source, (optimization, *FLAGS, *flags))
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise UserError(f"cannot load the kernels compiled by {compiler}: {error}") from None
    for name, letters in signatures.items():
        function = getattr(library, name)
        function.argtypes = [TYPES[letter] for letter in letters]
        function.restype = None
    return library


def _find_compiler() -> str:
    """The path of the compiler that CC names, or else of the first that is installed."""
    if SYSTEM == "Windows":
        # Visual C++ has no vectors as in vectors.h. GCC puts them at addresses on the stack that
        # are no multiples of their size, so that the process would end (GCC bug 54412).
        raise UserError("the kernels in C run on Linux and macOS, on Windows only in WSL")
    names = COMPILERS
    if os.environ.get("CC"):
        names = (os.environ["CC"],)
    for name in names:
        path = shutil.which(name)
        if path is not None:
            return path
    raise UserError(f"no C compiler found ({', '.join(names)})")


def has_compiler() -> bool:
    """Whether load_library() succeeds."""
    try:
        load_library()
    except UserError:
        return False
    return True


def _find_or_compile(compiler: str, source: Path, flags: tuple[str, ...]) -> Path:
    """Path of the library, whose name has the hash of its contents: loading a damaged one would end
    the process."""
    folder, key = _cache_folder(), _key(compiler, source, flags)
    for path in folder.glob(f"{key}-*.so"):
        if path.stem.endswith(_hash(path.read_bytes())):
            return path
    # Written to a temporary file and renamed, because other processes may do the same.
    temporary = folder / f".{key}.{os.getpid()}.so"
    command = [compiler, *flags, "-o", str(temporary), str(source), "-lm"]
    if sys.stderr.isatty():  # so that nobody waits for a minute without knowing why
        print(f"compiling {source.name} for this processor, once", file=sys.stderr)
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL
        )
        if result.returncode or not temporary.exists():
            reason = _reason(result.stderr)
            raise UserError(f"{compiler} cannot compile the kernels: {reason}")
        return temporary.replace(folder / f"{key}-{_hash(temporary.read_bytes())}.so")
    except OSError as error:
        raise UserError(f"{compiler} cannot compile the kernels: {error}") from None
    finally:
        temporary.unlink(missing_ok=True)


def _reason(messages: str) -> str:
    """The first line of a compiler's messages that names an error, or else the last line."""
    lines = messages.strip().splitlines()
    for line in lines:
        if "error" in line:
            return line
    return lines[-1] if lines else "no message"


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:20]


def _cache_folder() -> Path:
    """A folder for compiled kernels: the user's cache, or a temporary one if that cannot be
    written."""
    try:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = base / "thinker" / "kernels"
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except (OSError, RuntimeError):  # RuntimeError: no home
        pass
    return Path(tempfile.mkdtemp(prefix="thinker-kernels-"))


def _key(compiler: str, source: Path, flags: tuple[str, ...]) -> str:
    """Changes with source, headers, flags, compiler, CPU and torch, whose OpenMP library is
    linked."""
    cpu = [platform.machine()]
    if CPU_INFO.exists():
        described = r"(?m)^(?:model name|flags|Features)\s*:.*"
        cpu = re.findall(described, CPU_INFO.read_text())[:2]
    headers = sorted(FOLDER.rglob("*.h"))
    texts = [path.read_text(encoding="utf-8") for path in (source, *headers)]
    stat = os.stat(compiler)
    found = [compiler, stat.st_size, stat.st_mtime_ns, "".join(cpu), torch.__version__]
    return _hash("\n".join(map(str, [*texts, *flags, *found])).encode())
