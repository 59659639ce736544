"""The fused kernels of decoding compile for every card they are meant for, as a step launches them:
they read weights, keys and values by 16 bytes, and use no local memory.

This needs Triton, but neither a GPU nor a CUDA build of torch.
"""

import importlib
import itertools
import re
import subprocess
from pathlib import Path

import fake_cuda
import lowering  # noqa: F401 - Triton's driver without a device
import pytest
import torch
import triton
from conftest import random_model
from triton.runtime.jit import JITFunction

from thinker.generation import fused
from thinker.generation.decoders.inference_model import KINDS, _Fusing
from thinker.generation.fused.batch_step import BatchStep
from thinker.generation.fused.fused_step import FusedStep, unsupported

FOLDER = Path(fused.__file__).parent
SOURCES = {path.name: [*path.read_text().splitlines(), ""] for path in FOLDER.glob("*.py")}
LARGE = re.compile(r"tl\.load\((w|keys|values) \+")  # reads of weights, keys or values
FILE = re.compile(r'\.file\s+(\d+) ".*/(\w+\.py)"')
LOCATION = re.compile(r"\.loc\s+(\d+) (\d+) ")
LOAD = re.compile(r"ld\.global\S*?(\.v(?P<n>\d))?\.b(?P<bits>\d+)\s")
ASYNC_COPY = re.compile(r"cp\.async\S*shared\.global .*?, (0x\w+)")
WAIT = "griddepcontrol.wait"
SHAPES = {  # heads of 128 with a norm, and several queries per key
    "124m": {
        "vocab_size": 50304, "d_model": 768, "n_heads": 6, "n_kv_heads": 6, "head_dim": 128,
        "d_ff": 2048, "qk_norm": True,
    },
    "1.1b": {
        "vocab_size": 32000, "d_model": 2048, "n_heads": 32, "n_kv_heads": 4, "head_dim": 64,
        "d_ff": 5632, "qk_norm": False,
    },
}  # fmt: skip
BOTH_TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
CARDS = [pytest.param((7, 5), torch.float16, False, id="sm_75-fp16")]
for card, (label, dtype) in itertools.product(((8, 0), (8, 6), (8, 9), (9, 0)), BOTH_TYPES.items()):
    CARDS.append(pytest.param(card, dtype, False, id=f"sm_{card[0]}{card[1]}-{label}"))
for label, dtype in BOTH_TYPES.items():
    CARDS.append(pytest.param((9, 0), dtype, True, id=f"sm_90-{label}-overlap"))
# On Turing, a product of several queries has no tensor cores in Triton, and needs more registers.
WITH_STACK = [((7, 5), "1.1b", "attention_kernel")]


def kernels():
    """The kernels of the folder by name; other functions of Triton are inlined into them."""
    found = {}
    for path in FOLDER.glob("*.py"):
        module = importlib.import_module(f"{fused.__name__}.{path.stem}")
        for name, value in vars(module).items():
            if isinstance(value, JITFunction) and name.endswith("_kernel"):
                found[name] = value
    return found


def model_of(shape, dtype, bits=None):
    """A model of one layer on the CPU, whose matrices are those of a GPU."""
    plain = random_model(n_layers=1, max_seq_len=1024, **SHAPES[shape])
    fusing = _Fusing(plain, dtype, bits, False, KINDS)
    fusing.on_cpu = False
    model = fusing.run()
    assert unsupported(model) == ""
    return model


def launch_everything(shape, dtype, overlap):
    """Steps of one text with weights in 16 and 8 bits, and of a batch."""
    model = model_of(shape, dtype)
    in_8_bits = model_of(shape, dtype, 8)
    steps = [FusedStep(each, each.new_cache(1, 1024), 1, overlap) for each in (model, in_8_bits)]
    steps.append(BatchStep(model, model.new_cache(4, 1024), 4))
    for step in steps:
        step.step()
        step.sample()
        step.summarize()


@pytest.fixture
def compiled(monkeypatch):
    """What is launched is compiled instead: (name, constants, kernel) of each launch."""
    found, run = [], JITFunction.run

    def compile_only(self, *arguments, warmup, **options):
        found.append((self.__name__, options, run(self, *arguments, warmup=True, **options)))

    monkeypatch.setattr(JITFunction, "run", compile_only)
    return found


def large_reads(ptx):
    """Where weights, keys or values are read: (position in the program, which, bytes)."""
    found, pointer = [], None
    files = {number: SOURCES.get(name) for number, name in FILE.findall(ptx)}
    for position, line in enumerate(ptx.splitlines()):
        if location := LOCATION.search(line):
            source, match = files.get(location[1]), None
            if source is not None:  # not Triton's own
                match = LARGE.search(source[int(location[2]) - 1])
            pointer = match and match[1]
        if pointer is None:
            continue
        if load := LOAD.search(line):
            found.append((position, pointer, int(load["n"] or 1) * int(load["bits"]) // 8))
        elif copy := ASYNC_COPY.search(line):
            found.append((position, pointer, int(copy[1], 16)))
    return found


def used_memory(kernel, folder):
    """Bytes of a thread's stack, where registers are spilled, and of its local memory."""
    path = folder / "kernel.cubin"
    path.write_bytes(kernel.asm["cubin"])
    command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [int(re.search(rf"{name}:(\d+)", done.stdout)[1]) for name in ("STACK", "LOCAL")]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("card", "dtype", "overlap"), CARDS)
def test_kernels_compile_read_by_16_bytes_and_spill_nothing(
    shape, card, dtype, overlap, compiled, monkeypatch, tmp_path
):
    monkeypatch.setattr(fake_cuda.GPU, "major", card[0])
    monkeypatch.setattr(fake_cuda.GPU, "minor", card[1])
    for kernel in kernels().values():
        kernel.device_caches.clear()  # made for another card
    launch_everything(shape, dtype, overlap)
    assert {name for name, _, _ in compiled} == kernels().keys()
    pointers = set()
    for name, options, kernel in compiled:
        assert kernel.metadata.target.arch == 10 * card[0] + card[1]
        ptx = kernel.asm["ptx"]
        reads = large_reads(ptx)
        assert {n_bytes for _, _, n_bytes in reads} <= {16}, name
        if (card, shape, name) not in WITH_STACK:
            assert used_memory(kernel, tmp_path) == [0, 0], name
        waits = [number for number, line in enumerate(ptx.splitlines()) if WAIT in line]
        assert len(waits) == options.get("OVERLAP", False), name
        if waits and any(pointer == "w" for _, pointer, _ in reads):
            assert reads[0][0] < waits[0], name  # weights do not depend on the previous kernel
        pointers.update(pointer for _, pointer, _ in reads)
    source = "\n".join(itertools.chain.from_iterable(SOURCES.values()))
    assert pointers == set(LARGE.findall(source))
