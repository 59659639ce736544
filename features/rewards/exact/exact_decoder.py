"""A decoder whose texts have the same bits in any batch and any split into passes."""

from __future__ import annotations

import torch

from thinker.generation.caches.cache_factory import CacheFactory
from thinker.generation.decoders.inference_model import fuse_for_inference
from thinker.generation.decoders.native_decoder import NativeDecoder, kernel_problem
from thinker.generation.setup import Setup
from thinker.model import Thinker, proof
from thinker.runtime.checks import check_types
from thinker.runtime.errors import UserError

# Of the texts that are read in several ways: whole, then in parts of these lengths.
TEXT_LENGTH = 23
PARTS = (1, 7)
ROWS = 5


def make_decoder(setup: Setup, caches: CacheFactory, exact: bool = False) -> NativeDecoder | None:
    """For the option `exact`: logits have the same bits whatever the batch, and however a text is
    split into passes.

    Needs a CPU, kernels in C, and full attention in all layers. Raises UserError if they are not
    there, and for options that it does not suit.
    """
    check_types({"exact": bool}, locals())
    if not exact:
        return None
    setup.need_cache("exact")
    if caches.option:
        raise UserError(f"exact cannot be combined with {caches.option}; use only one")
    if setup.compile is False:
        raise UserError("exact needs kernels in C; leave out compile=False")
    if not setup.is_on_cpu:
        raise UserError("exact needs a model on the CPU")
    problem = kernel_problem(setup.dtype)
    if problem:
        raise UserError(f"exact needs kernels in C: {problem}")
    model, may_decode, problem = setup.prepare(setup.model, native=True)
    if not may_decode:
        raise UserError(f"exact needs kernels in C: {problem}")
    decoder = NativeDecoder(model, for_all_passes=True)
    if decoder.kernel_problem:
        raise UserError(f"exact needs kernels in C: {decoder.kernel_problem}")
    if not decoder.is_causal:
        config = setup.config
        raise UserError(
            "exact needs full attention in all layers and no ALiBi (this model has "
            f"model.attention={config.attention}, model.positions={config.positions})"
        )
    key = ("exact", setup.dtype)
    if not proof.kept(key, setup.model, lambda: has_equal_rows(setup.model, setup.dtype)):
        raise UserError(
            "exact is not available: on this processor, the kernels in C give a token other bits "
            "in another batch"
        )
    return decoder


@torch.no_grad()
def has_equal_rows(model: Thinker, dtype: torch.dtype) -> bool:
    """Whether the kernels compute texts to the same bits in a batch and alone in parts, shown with
    a twin of a model (model/proof.py)."""
    with proof.own_random_numbers() as noise:
        twin = proof.narrow_twin(model, noise).eval()
    decoder = NativeDecoder(fuse_for_inference(twin, dtype, native=True), for_all_passes=True)
    config = twin.config
    length = min(TEXT_LENGTH, config.max_cached_len)
    tokens = torch.arange(ROWS * length).view(ROWS, length) % config.vocab_size
    known = decoder.step(tokens, decoder.model.new_cache(ROWS, length))
    for row in range(ROWS):
        for n in PARTS:
            cache = decoder.model.new_cache(1, length)
            parts = tokens[row : row + 1].split(n, dim=1)
            found = torch.cat([decoder.step(part, cache) for part in parts], dim=1)
            if not torch.equal(found[0], known[row]):
                return False
    return True
