"""Without an exit, the decoder with early exit keeps the contract of all decoders."""

import pytest
from decoder_contract import CHECKS, DecoderCase

from thinker.features.early_exit.decoder import EarlyExitDecoder
from thinker.generation.decoders.inference_model import fuse_for_inference

pytestmark = pytest.mark.usefixtures("one_thread")


def never_exits(model):
    return EarlyExitDecoder(fuse_for_inference(model), 1 - 1e-9)


CASES = [
    DecoderCase("full", never_exits),
    DecoderCase("window", never_exits, attention="window(5)"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_decoder_with_early_exit_keeps_the_contract(case, check):
    check(case)
