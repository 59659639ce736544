"""The decoder with fused kernels, in Triton's interpreter on a CPU: logits, texts and scores."""

import importlib.util
import itertools
import math
import os
import random
import time

import pytest
import torch
from conftest import random_model
from decoder_contract import CHECKS, DecoderCase

from thinker.benchmarks.contenders import stream
from thinker.data.tokenizers.tokenizer_factory import make_tokenizer
from thinker.generation import Generator, SamplingParams, sampler
from thinker.generation.decoders.inference_model import fuse_for_inference
from thinker.model.layers import Linear

TOKENIZER = make_tokenizer("byte", [])
NO_END = {TOKENIZER.bos_id: -math.inf}
HAS_TRITON = importlib.util.find_spec("triton") is not None
pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
SHAPES = {  # sizes that are no multiples of a tile, and one or several queries per key
    "n_heads": [2, 4],
    "n_kv_heads": [1, 2],
    "head_dim": [16, 32],
    "d_model": [40, 64],
    "d_ff": [50, 96],
    "qk_norm": [False, True],
    "attention_bias": [False, True],
    "tie_embeddings": [False, True],
}


def interpret(function, *args):
    """What a function of this module yields in a process where Triton interprets."""
    return list(stream(function, *args, deadline=time.monotonic() + 600, is_fresh=True))


def as_on_a_gpu(model):
    """A copy for inference, whose matrices are those of a GPU."""
    copy = fuse_for_inference(model)
    for module in copy.modules():
        if isinstance(module, Linear):
            module.__class__ = Linear
    return copy


def new_decoder(model):
    os.environ["TRITON_INTERPRET"] = "1"
    # Only now: the kernels are made when their module is imported.
    from thinker.generation.fused import fused_step
    from thinker.generation.fused.fused_decoder import FusedDecoder

    # Each program takes the interpreter milliseconds. Several per product, with a rest, are enough.
    fused_step.SAMPLE_ROWS = 128
    fused_step.HEAD_TILES = fused_step.Tiles(128, 32, 4)
    for name in ("QKV", "OUT", "GATE", "DOWN"):
        setattr(fused_step, f"{name}_TILES", fused_step.Tiles(64, 32, 4))

    decoder = FusedDecoder(as_on_a_gpu(model))
    assert decoder.fused_problem == ""
    return decoder


def yield_steps(seed, n_cases):
    """Logits of every token of a text, and what the kernels say of them."""
    numbers = random.Random(seed)
    for _ in range(n_cases):
        shape = {name: numbers.choice(values) for name, values in SHAPES.items()}
        model = random_model(
            seed,
            0.3,
            0.4,
            vocab_size=numbers.choice([264, 301]),
            max_seq_len=128,
            n_layers=2,
            **shape,
        )
        decoder = new_decoder(model)
        tokens = torch.randint(0, 264, (1, numbers.choice([3, 6, 70])))
        with torch.no_grad():
            known = model(tokens)
        cache = decoder.model.new_cache(1, 128)
        n_read = max(1, tokens.shape[1] - 3)
        decoder.prefill(tokens[:, :n_read], cache)
        found = []
        for token in tokens[0, n_read:].tolist():
            found.append(decoder.step(torch.tensor([[token]]), cache))
        error = float((torch.cat(found, 1) - known[:, n_read:]).abs().max() / known.abs().max())
        n_launches = len(decoder._text.fused._step) + 1  # and that of the sampler
        yield {"shape": shape, "error": error, "problem": decoder.fused_problem, "n": n_launches}


@pytest.mark.parametrize("seed", range(2))
def test_steps_of_drawn_shapes_have_the_logits_of_the_model(seed):
    results = interpret(yield_steps, seed, 3)
    assert len(results) == 3
    for result in results:
        assert result["problem"] == ""
        assert result["error"] < 2e-6, result
        assert result["n"] == 5 * 2 + 3  # per token, with 2 layers; 63 with 12


def yield_texts():
    model = random_model(1, 0.3, 0.4, vocab_size=301, max_seq_len=64, head_dim=16, qk_norm=True)
    plain, fused = (Generator(model, TOKENIZER, compile=False) for _ in range(2))
    fused.decoder = new_decoder(model)
    for temperature, n_new in itertools.product((0.0, 0.7, 30.0), (1, 19)):
        params = SamplingParams(n_new, temperature=temperature, seed=n_new)
        (known,) = plain.generate(["The cat"], params)
        (found,) = fused.generate(["The cat"], params)
        yield {
            "tokens": (found.token_ids, known.token_ids),
            "logprobs": (found.logprobs, known.logprobs),
            "reasons": (found.finish_reason, known.finish_reason),
        }


def test_texts_are_those_of_plain_decoding():
    results = interpret(yield_texts)
    assert len(results) == 6
    for result in results:
        found, known = result["tokens"]
        assert found == known
        assert result["reasons"][0] == result["reasons"][1]
        found, known = result["logprobs"]
        assert found == pytest.approx(known, abs=1e-4)
    assert max(len(result["tokens"][0]) for result in results) > 16


def yield_checks(names):
    os.environ["TRITON_INTERPRET"] = "1"
    with torch.compiler.set_stance("force_eager"):  # what is compiled is tested elsewhere
        for check in CHECKS:
            if check.__name__ in names:
                check(DecoderCase("fused", new_decoder))
                yield {"check": check.__name__}


def test_the_decoder_keeps_the_contract():
    names = [check.__name__ for check in CHECKS]
    assert [result["check"] for result in interpret(yield_checks, names)] == names


def edit_norm(decoder):
    decoder.model.blocks[0].mlp_norm.forward = lambda x: x


def edit_sampler(decoder):
    sampler.sample = lambda logits, *rest: logits.argmin(dim=-1)


EDITS = [edit_norm, edit_sampler]  # which no type of a module shows


def yield_problems():
    for edit in EDITS:
        model = random_model(1, 0.3, 0.4, vocab_size=264, max_seq_len=64, head_dim=16)
        decoder = new_decoder(model)
        cache = decoder.model.new_cache(1, 64)
        tokens = torch.tensor([[1, 2, 3]])
        edit(decoder)
        with torch.compiler.set_stance("force_eager"), torch.no_grad():
            decoder.prefill(tokens, cache)
            found = decoder.step(tokens[:, :1], cache)
            plain = decoder.model.new_cache(1, 64)
            decoder.model(tokens, cache=plain)
            known = decoder.model(tokens[:, :1], cache=plain)
        error = float((found - known).abs().max())
        yield {"problem": decoder.fused_problem, "report": decoder.report(), "error": error}


def test_the_kernels_stand_aside_for_what_computes_something_else():
    results = interpret(yield_problems)
    assert len(results) == len(EDITS)
    for result in results:
        assert "computes something else" in result["problem"]
        assert result["problem"] in result["report"]
        assert result["error"] < 1e-5


UNKNOWN = [
    ({"activation": "gelu"}, "activation"),
    ({"mlp": "ungated"}, "module UngatedMLP"),
    ({"norm": "layernorm"}, "module LayerNorm"),
    ({"attention": "window(8)"}, "attention"),
    ({"head_dim": 24}, "heads of 24"),
]


def yield_unknown():
    from thinker.generation.fused.fused_decoder import FusedDecoder

    for options, _ in UNKNOWN:
        options = {"head_dim": 16, **options}
        model = random_model(vocab_size=264, max_seq_len=64, **options)
        yield {"problem": FusedDecoder(as_on_a_gpu(model)).fused_problem}


def test_the_kernels_say_what_they_do_not_know():
    problems = [result["problem"] for result in interpret(yield_unknown)]
    for problem, (_, reason) in zip(problems, UNKNOWN, strict=True):
        assert reason in problem
