"""Kernels that run on an emulated ARM processor, in place of those of thinker.native."""

import ctypes
import os
import shutil
import struct
import subprocess
import threading
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np

from thinker.native import compiler

COMPILER = "aarch64-linux-gnu-gcc"
EMULATOR = "qemu-aarch64"
SYSTEM = "/usr/aarch64-linux-gnu"  # its dynamic linker and libraries
CALLER = Path(__file__).parent / "call_kernels.c"
PAGE = 4096
N_INTEGERS, N_DOUBLES = 16, 8
REQUEST = struct.Struct(f"32s{N_INTEGERS}q{N_DOUBLES}d")  # as in call_kernels.c
ANSWER = struct.Struct("qq")
FETCH, WRITE, RETURN = map(ord, "FWR")
MAX_STARTS = 20


def missing_tools() -> list[str]:
    """What is not installed of the compiler, the emulator and the libraries."""
    missing = [name for name in (COMPILER, EMULATOR) if shutil.which(name) is None]
    if not Path(SYSTEM, "lib").exists():
        missing.append(SYSTEM)
    return missing


class EmulatedLibrary:
    """Has a file of native/ compiled for ARM, and the functions of `signatures` as attributes."""

    def __init__(self, source: str, signatures: dict[str, str], flags: list[str], folder: Path):
        self.calls: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._memory = os.open("/proc/self/mem", os.O_RDONLY)  # reading it never crashes
        library, caller = folder / f"{source}.so", folder / "call_kernels"
        shared = [*flags, "-fopenmp", "-shared", "-fPIC", "-std=gnu11", "-lm"]
        _compile(compiler.FOLDER / source, library, shared)
        _compile(CALLER, caller, ["-O1", "-std=gnu11", "-ldl"])
        self._command = [EMULATOR, "-L", SYSTEM, str(caller), str(library)]
        self._process: subprocess.Popen | None = None
        for name, letters in signatures.items():
            setattr(self, name, _Function(self, name, letters))

    def call(self, name: str, integers: list[int], doubles: list[float]) -> int:
        """What a function returns. Raises AssertionError if it reads what is not there."""
        with self._lock:
            self.calls[name] += 1
            process = self._apart()
            integers += [0] * (N_INTEGERS - len(integers))
            doubles += [0.0] * (N_DOUBLES - len(doubles))
            process.stdin.write(REQUEST.pack(name.encode(), *integers, *doubles))
            process.stdin.flush()
            while True:
                kind, value = ANSWER.unpack(self._read(ANSWER.size))
                if kind == RETURN:
                    return value
                if kind == FETCH:
                    self._send(name, value)
                if kind == WRITE:
                    self._store(value)

    def _read(self, n: int) -> bytes:
        content = self._process.stdout.read(n)
        assert len(content) == n, f"the emulated process ended: {self._process.wait()}"
        return content

    def _send(self, name: str, address: int) -> None:
        """Send a page of this process."""
        try:
            page = os.pread(self._memory, PAGE, address)
        except (OSError, OverflowError):
            page = b""
        if len(page) != PAGE:
            self.close()
            raise AssertionError(f"{name}() touches {address:#x}, where nothing is")
        self._process.stdin.write(page)
        self._process.stdin.flush()

    def _store(self, address: int) -> None:
        """Write the bytes of a page that a kernel has changed; others may have changed here."""
        before = np.frombuffer(self._read(PAGE), np.uint8)
        after = np.frombuffer(self._read(PAGE), np.uint8)
        here = np.ctypeslib.as_array((ctypes.c_uint8 * PAGE).from_address(address))
        changed = before != after
        here[changed] = after[changed]

    def _apart(self) -> subprocess.Popen:
        """The emulated process, started again until the emulator's own memory lies where this
        process has none: both use the same addresses."""
        for _ in range(MAX_STARTS):
            if self._process is None:
                pipe = subprocess.PIPE
                variables = {**os.environ, "OMP_WAIT_POLICY": "passive"}
                self._process = subprocess.Popen(
                    self._command, stdin=pipe, stdout=pipe, env=variables
                )
            if not _overlap(_mappings("self"), _mappings(self._process.pid)):
                return self._process
            self.close()
        raise AssertionError("the emulator always starts at addresses that are in use")

    def close(self) -> None:
        """End the emulated process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


class _Function:
    """A function of a library, called as one of ctypes."""

    def __init__(self, library: EmulatedLibrary, name: str, letters: str):
        self.restype: type | None = None
        self._library = library
        self._name = name
        self._letters = letters

    def __call__(self, *arguments: object) -> int | None:
        assert len(arguments) == len(self._letters)
        integers, doubles = [], []
        for letter, argument in zip(self._letters, arguments):
            if letter == "d":
                doubles.append(float(argument))
            elif letter == "i":
                integers.append(int(argument))
            else:
                integers.append(_address(argument))
        result = self._library.call(self._name, integers, doubles)
        return None if self.restype is None else result


def _address(pointer: object) -> int:
    if pointer is None:
        return 0
    if isinstance(pointer, int):
        return pointer
    return ctypes.addressof(getattr(pointer, "_obj", pointer))  # _obj: of byref()


def _compile(source: Path, target: Path, flags: list[str]) -> None:
    command = [COMPILER, str(source), "-o", str(target), *flags]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def _mappings(process: object) -> list[tuple[int, int]]:
    ranges = []
    for line in Path(f"/proc/{process}/maps").read_text().splitlines():
        if "[vsyscall]" not in line:  # at one place everywhere
            begin, end = line.split()[0].split("-")
            ranges.append((int(begin, 16), int(end, 16)))
    return ranges


def _overlap(ranges: list[tuple[int, int]], others: list[tuple[int, int]]) -> bool:
    ordered = sorted(ranges + others)
    return any(one[1] > other[0] for one, other in pairwise(ordered))
