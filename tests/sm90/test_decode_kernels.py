"""The fused kernels of decoding compile for an H200 as the benchmark launches them: they read
weights, keys and values by 16 bytes, and use no local memory.

This needs Triton, but neither a GPU nor a CUDA build of torch.
"""

import functools
import re
import subprocess
from pathlib import Path

import lowering  # noqa: F401 - Triton's driver without a device
import pytest
import torch
import triton

from thinker.benchmarks.gpu import decode_kernels
from thinker.benchmarks.gpu.fused_decoding import SHAPES, TRIALS, FusedModel

SOURCE = Path(decode_kernels.__file__).read_text().splitlines()
LARGE = re.compile(r"tl\.load\((w|keys|values) \+")  # reads of weights, keys or values
LOCATION = re.compile(r"\.loc\s+\d+ (\d+) ")
LOAD = re.compile(r"ld\.global\S*?(\.v(?P<n>\d))?\.b(?P<bits>\d+)\s")
ASYNC_COPY = re.compile(r"cp\.async\S*shared\.global .*?, (0x\w+)")
WAIT = "griddepcontrol.wait"


@functools.cache
def make_model(shape, weights):
    """A model of one layer, on the CPU."""
    sizes = SHAPES[shape]._replace(n_layers=1)
    return FusedModel(sizes, torch.device("cpu"), torch.bfloat16, weights == "int8")


def compiled(launch):
    return launch.kernel.warmup(*launch.arguments, grid=launch.grid, **launch.constants)


def large_reads(ptx):
    """Where the weights, keys or values are read: (position in the program, bytes)."""
    found, source_line = [], ""
    for position, line in enumerate(ptx.splitlines()):
        if location := LOCATION.search(line):
            source_line = SOURCE[int(location[1]) - 1]
        if not LARGE.search(source_line):
            continue
        if load := LOAD.search(line):
            found.append((position, int(load["n"] or 1) * int(load["bits"]) // 8))
        elif copy := ASYNC_COPY.search(line):
            found.append((position, int(copy[1], 16)))
    return found


def used_memory(kernel, folder):
    """Bytes of a thread's stack, where registers are spilled, and of its local memory."""
    path = folder / "kernel.cubin"
    path.write_bytes(kernel.asm["cubin"])
    command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [int(re.search(rf"{name}:(\d+)", done.stdout)[1]) for name in ("STACK", "LOCAL")]


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
@pytest.mark.parametrize("name", TRIALS["bf16"])
@pytest.mark.parametrize("weights", TRIALS)
@pytest.mark.parametrize("shape", ["124m", "1.1b"])
def test_a_kernel_reads_by_16_bytes_without_local_memory(shape, weights, name, overlap, tmp_path):
    model = make_model(shape, weights)
    trials = TRIALS[weights][name]
    for tiles in trials[:1] if overlap else trials:
        kernel = compiled(model.launch(name, model.layers[0], tiles, overlap))
        ptx = kernel.asm["ptx"]
        reads = large_reads(ptx)
        assert {n_bytes for _, n_bytes in reads} == {16}, tiles
        assert used_memory(kernel, tmp_path) == [0, 0], tiles
        waits = [number for number, line in enumerate(ptx.splitlines()) if WAIT in line]
        assert len(waits) == overlap
        if overlap and name != "attention":  # it reads what the previous kernel has written
            assert reads[0][0] < waits[0]


def test_the_choice_of_a_token_compiles(tmp_path):
    model = make_model("124m", "bf16")
    for overlap in (False, True):
        kernel = compiled(model.sample_launch(TRIALS["bf16"]["head"][0], overlap))
        assert (WAIT in kernel.asm["ptx"]) == overlap
        assert used_memory(kernel, tmp_path) == [0, 0]
