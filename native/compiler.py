"""Compile the kernels with the C compiler of this machine, once, and load them."""

import ctypes
import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch  # first, so that the library shares torch's OpenMP threads

from thinker.runtime.errors import UserError

FOLDER = Path(__file__).parent
FLAGS = ("-O3", "-march=native", "-fopenmp", "-shared", "-fPIC", "-std=gnu11")
TRAINING_FLAGS = (
    "-fno-trapping-math",
)  # without it GCC does not vectorize loops that choose between two numbers
COMPILERS = ("gcc", "clang", "cc")
CPU_INFO = Path("/proc/cpuinfo")


@cache
def load_library() -> ctypes.CDLL:
    """The compiled decode.c. Raises UserError with the reason if this machine cannot compile or
    load it."""
    library = _load("decode.c", FLAGS)
    pointer, integer = ctypes.c_void_p, ctypes.c_int64
    library.run.argtypes = pointer, integer, pointer, integer
    library.sample.argtypes = pointer, integer, integer, integer, *[pointer] * 7
    library.sample_steps.argtypes = (
        pointer,
        integer,
        pointer,
        pointer,
        integer,
        pointer,
        integer,
        integer,
        *[pointer] * 5,
        integer,
    )
    library.max_rows.argtypes, library.max_rows.restype = (), integer
    library.run.restype = library.sample.restype = library.sample_steps.restype = None
    return library


@cache
def load_training_library() -> ctypes.CDLL:
    """The compiled train.c, which takes a few seconds, not half a minute. Raises UserError as
    load_library() does."""
    library = _load("train.c", FLAGS + TRAINING_FLAGS)
    pointer, integer, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
    signatures = {
        "rms_norm": (pointer, integer, pointer, number, integer, integer, pointer),
        "rms_norm_backward": (
            pointer,
            pointer,
            integer,
            pointer,
            number,
            integer,
            integer,
            pointer,
            pointer,
            pointer,
        ),
        "rotate_heads": (pointer,),
        "rotate_heads_backward": (pointer,),
        "swiglu": (pointer, integer, integer, integer, pointer),
        "swiglu_backward": (pointer, pointer, integer, integer, integer, pointer),
        "dropout": (pointer, integer, integer, pointer, number, pointer),
        "muon_momentum": (
            pointer,
            pointer,
            integer,
            integer,
            integer,
            number,
            integer,
            pointer,
            integer,
        ),
        "muon_update": (
            pointer,
            integer,
            pointer,
            pointer,
            integer,
            integer,
            integer,
            number,
            number,
            number,
            integer,
            pointer,
        ),
    }
    for name, types in signatures.items():
        function = getattr(library, name)
        function.argtypes, function.restype = (
            (*types, integer),
            None,
        )  # the last argument is the number of threads
    return library


def _load(source: str, flags: tuple[str, ...]) -> ctypes.CDLL:
    """A compiled file of this folder."""
    wanted = (os.environ["CC"],) if os.environ.get("CC") else COMPILERS
    compiler = next((path for name in wanted if (path := shutil.which(name))), None)
    if compiler is None:
        raise UserError(f"no C compiler found ({', '.join(wanted)})")
    try:
        return ctypes.CDLL(str(_find_or_compile(compiler, FOLDER / source, flags)))
    except OSError as error:
        raise UserError(f"cannot load the kernels compiled by {compiler}: {error}") from None


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
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL
        )
        if result.returncode or not temporary.exists():
            lines = result.stderr.strip().splitlines()
            reason = next(
                (line for line in lines if "error" in line), lines[-1] if lines else "no message"
            )
            raise UserError(f"{compiler} cannot compile the kernels: {reason}")
        return temporary.replace(folder / f"{key}-{_hash(temporary.read_bytes())}.so")
    except OSError as error:
        raise UserError(f"{compiler} cannot compile the kernels: {error}") from None
    finally:
        temporary.unlink(missing_ok=True)


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
    cpu = platform.machine()
    if CPU_INFO.exists():
        cpu = "".join(
            re.findall(r"(?m)^(?:model name|flags|Features)\s*:.*", CPU_INFO.read_text())[:2]
        )
    stat = os.stat(compiler)
    parts = [
        *(path.read_text() for path in (source, *sorted(FOLDER.glob("*.h")))),
        *flags,
        compiler,
        stat.st_size,
        stat.st_mtime_ns,
        cpu,
    ]
    return _hash("\n".join(map(str, [*parts, torch.__version__])).encode())
