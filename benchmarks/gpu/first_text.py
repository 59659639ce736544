"""GPU stage: how long the first token of a process takes with fused kernels, and whether they run.

Every process starts anew. The first one of a model has no compiled kernels, the second one finds
those of the first in Triton's cache. A rehearsal runs the kernels in Triton's interpreter.
"""

import importlib.util
import os
import tempfile
import time
from pathlib import Path

import torch

from thinker.benchmarks.contenders import stream
from thinker.benchmarks.environment import measure_seconds
from thinker.benchmarks.gpu.gpu_training import Campaign, Results
from thinker.benchmarks.speed.decode import make_random_model, thinker_generate
from thinker.data.tokenizers.tokenizer_factory import make_tokenizer
from thinker.generation import Generator
from thinker.runtime.backend import configure_backend

NO_TRITON = "not run: Triton is not installed"
SHAPE = "124m"
N_PROMPT = 32
CAPACITY = 256  # positions


def first_text(campaign: Campaign, deadline: float) -> Results:
    """The first and the second text of a process, with an empty cache of kernels and with a full
    one; an error where the kernels stand aside."""
    if importlib.util.find_spec("triton") is None:
        yield {"name": "kernels", "note": NO_TRITON}
        return
    shape = "tiny" if campaign.is_rehearsal else SHAPE
    with tempfile.TemporaryDirectory() as folder:
        for cache in ("empty", "full"):
            name = f"{shape}, {cache} cache"
            arguments = (name, shape, Path(folder), campaign, time.monotonic())
            options = {**campaign.options, "is_fresh": True}
            yield from stream(time_first_text, *arguments, deadline=deadline, **options)


def time_first_text(
    name: str, shape: str, cache: Path, campaign: Campaign, started: float
) -> Results:
    """The result of one process, which was started at `started` (time.monotonic())."""
    # Triton reads both when it is imported or compiles, which is later.
    os.environ["TRITON_CACHE_DIR"] = str(cache)
    if campaign.is_rehearsal:
        os.environ["TRITON_INTERPRET"] = "1"
    device = campaign.device
    configure_backend(device)
    model = make_random_model(shape, CAPACITY, device)
    if campaign.is_rehearsal:
        generator = interpreted_generator(model)
    else:
        generator = Generator(model, make_tokenizer("byte", []), dtype=torch.bfloat16, compile=True)
    ready_s = time.monotonic() - started
    generate = thinker_generate(generator, 1, N_PROMPT)
    first_token_s = measure_seconds(lambda: generate(1), device)
    second_token_s = measure_seconds(lambda: generate(1), device)
    decoder = generator.decoder
    report = decoder.report()
    result = {
        "name": name,
        "decoder": type(decoder).__name__,
        "ready_s": ready_s,
        "first_token_s": first_token_s,
        "second_token_s": second_token_s,
        "compile_s": decoder.compile_seconds,
        "report": report,
    }
    if report or result["decoder"] != "FusedDecoder":
        result["error"] = report or "the decoder has no fused kernels"
    yield result


def interpreted_generator(model: torch.nn.Module) -> Generator:
    """A Generator on a CPU whose decoder is that of a GPU."""
    # Only now: whether the kernels are interpreted is decided when their module is imported.
    from thinker.generation.decoders.inference_model import KINDS, fuse_for_inference
    from thinker.generation.decoders.plain_decoder import PlainDecoder
    from thinker.generation.fused.fused_decoder import FusedDecoder
    from thinker.model.layers import Linear

    generator = Generator(model, make_tokenizer("byte", []), compile=False)
    dense = fuse_for_inference(model, kinds=KINDS - {Linear})  # without matrices for a CPU
    generator.decoder = FusedDecoder(PlainDecoder(dense))
    return generator
