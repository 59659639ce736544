"""The contract of all decoders of generation/ (tests/decoder_contract.py)."""

import pytest
import torch
from decoder_contract import CHECKS, DecoderCase

from thinker.generation.decoders.compiled_decoder import CompiledDecoder
from thinker.generation.decoders.inference_model import fuse_for_inference
from thinker.generation.decoders.native_decoder import NativeDecoder
from thinker.generation.decoders.plain_decoder import PlainDecoder
from thinker.native.compiler import has_compiler

pytestmark = pytest.mark.usefixtures("one_thread")


def plain(model):
    return PlainDecoder(fuse_for_inference(model))


def native(model):
    if not has_compiler():
        pytest.skip("needs a C compiler")
    return NativeDecoder(fuse_for_inference(model, native=True))


def compiled(model):
    return CompiledDecoder(fuse_for_inference(model))


CASES = [
    DecoderCase("plain", plain),
    DecoderCase("plain, window", plain, attention="window(5)"),
    DecoderCase("native", native),
    DecoderCase("native, window", native, attention="window(5)"),
    DecoderCase("compiled", compiled),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_decoder_keeps_the_contract(case, check):
    with torch.compiler.set_stance("force_eager"):  # what is compiled is tested elsewhere
        check(case)
