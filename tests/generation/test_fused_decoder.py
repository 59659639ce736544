"""The decoder with fused kernels, in Triton's interpreter on a CPU: logits, texts and scores.

The interpreter is slow, so most of the tests belong to `make test-more`.
"""

import importlib.util
import math
import os
import random
import time
from functools import partial

import numpy
import pytest
import torch
from conftest import random_model
from decoder_contract import CHECKS, DecoderCase

from thinker.benchmarks.contenders import stream
from thinker.data.tokenizers.tokenizer_factory import make_tokenizer
from thinker.generation import Completion, Generator, SamplingParams, sampler
from thinker.generation.decoders.inference_model import KINDS, _Fusing
from thinker.generation.sequence import Sequence
from thinker.model.layers import Linear
from thinker.native.quantization import quantize
from thinker.runtime.errors import RunError

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


def as_on_a_gpu(model, bits=None):
    """A copy for inference, whose matrices are those of a GPU."""
    fusing = _Fusing(model, torch.float32, bits, False, KINDS)
    fusing.on_cpu = False
    return fusing.run()


def new_decoder(model, bits=None):
    os.environ["TRITON_INTERPRET"] = "1"
    # Only now: the kernels are made when their module is imported.
    from thinker.generation.decoders.plain_decoder import PlainDecoder
    from thinker.generation.fused import fused_step
    from thinker.generation.fused.fused_decoder import FusedDecoder

    # Each program takes the interpreter milliseconds. Several per product, with a rest, are enough.
    fused_step.SAMPLE_ROWS = 128
    fused_step.HEAD_TILES = fused_step.Tiles(128, 32, 4)
    for name in ("QKV", "OUT", "GATE", "DOWN"):
        setattr(fused_step, f"{name}_TILES", fused_step.Tiles(64, 32, 4))

    decoder = FusedDecoder(PlainDecoder(as_on_a_gpu(model, bits)))
    assert decoder.fused_problem == ""
    return decoder


def rounded(model):
    """A copy whose matrices have the values of weights in 8 bits."""
    copy = random_model(0, **model.config.to_dict())
    copy.load_state_dict(model.state_dict())
    head = quantize(copy.lm_head.weight, 8).dequantize()
    for module in copy.blocks.modules():
        if isinstance(module, Linear):
            module.weight.data = quantize(module.weight, 8).dequantize()
    copy.lm_head.weight = torch.nn.Parameter(head)  # the embedding is not rounded
    return copy


def yield_steps(seed, forms):
    """The error of the logits of the newest tokens of texts of unequal lengths, and what the
    decoder says. `forms`: numbers of texts, and bits of the weights."""
    numbers = random.Random(seed)
    for n_texts, bits in forms:
        shape = {name: numbers.choice(values) for name, values in SHAPES.items()}
        shape |= {"n_layers": 2, "vocab_size": numbers.choice([264, 301]), "max_seq_len": 128}
        model = random_model(seed, 0.3, 0.4, **shape)
        decoder = new_decoder(model, bits)
        tokens = torch.randint(0, 264, (n_texts, 73))
        lengths = [numbers.choice([1, 5, 70]) for _ in range(n_texts)]
        plain = model if bits is None else rounded(model)
        with torch.no_grad():
            known = plain(tokens)
        cache = None
        for row, length in enumerate(lengths):
            own = decoder.model.new_cache(1, 128)
            decoder.prefill(tokens[row : row + 1, :length], own)
            if cache is None:
                cache = own
            else:
                cache.concat_rows(own)
        error = 0.0
        for step in range(2):
            at = [length + step for length in lengths]
            rows = range(n_texts)
            found = decoder.step(tokens[rows, at][:, None], cache)
            error = max(error, float((found[:, 0] - known[rows, at]).abs().max()))
        error /= float(known.abs().max())
        n_texts = max(decoder._steps, default=0)
        n_launches = 0
        if n_texts:
            n_launches = len(decoder._steps[n_texts].fused.launches)
        case = {"shape": shape, "n_texts": n_texts, "bits": bits, "lengths": lengths}
        yield {**case, "error": error, "problem": decoder.fused_problem, "n": n_launches}


FORMS = [(1, None), (1, 8), (3, None)]


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.more)])
def test_steps_of_drawn_shapes_have_the_logits_of_the_model(seed):
    results = interpret(yield_steps, seed, FORMS)
    for result, (n_texts, _) in zip(results, FORMS, strict=True):
        assert result["problem"] == ""
        assert result["error"] < 2e-6, result
        # With 2 layers. A sampled token of one text takes one more, 63 with 12 layers.
        assert result["n"] == (5 * 2 + 2 if n_texts == 1 else 8 * 2 + 2)


@pytest.mark.more
def test_a_batch_of_weights_in_8_bits_is_not_expanded():
    (result,) = interpret(yield_steps, 0, [(2, 8)])
    assert result["problem"] == ""
    assert result["n_texts"] == 0
    assert result["error"] < 2e-6


def yield_rows():
    """What rows of a pool of four have after steps in turns: logits and samples, beside those of
    the model."""
    model = random_model(1, 0.3, 0.4, vocab_size=264, max_seq_len=64, head_dim=16)
    decoder = new_decoder(model)
    decoder.packs_rows = True  # as on a GPU
    decoder.steps_per_read = 3
    cache = decoder.model.new_cache(4, 64)
    assert decoder.reads_rows(type(cache))
    tokens = torch.randint(0, 250, (3, 30), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        known = model(tokens)
    place = {3: 0, 0: 1, 2: 2}  # the text of each row
    decoder.read(
        cache,
        [3] * 5 + [0] * 2 + [2] * 7,
        tokens[[0] * 5 + [1] * 2 + [2] * 7, [*range(5), *range(2), *range(7)]].tolist(),
        [],
    )
    for rows in ([2, 3, 0], [0, 2], [3]):
        at = [cache.lengths[row] for row in rows]
        texts = [place[row] for row in rows]
        wanted = list(range(len(rows)))[::-1]
        found = decoder.read(cache, rows, tokens[texts, at].tolist(), wanted)
        error = float((found - known[texts, at][wanted]).abs().max())
        yield {"rows": rows, "error": error}
    params = [SamplingParams(9, seed=row, temperature=0.8) for row in range(3)]
    rows = [2, 3, 0]
    lengths = list(cache.lengths)
    texts = [tokens[place[row], : lengths[row]].tolist() for row in rows]
    sequences = [
        Sequence(index, Completion(""), own, text, 9, TOKENIZER)
        for index, (own, text) in enumerate(zip(params, texts))
    ]
    logits = known[[place[row] for row in rows], [lengths[row] - 1 for row in rows]][:, None]
    sampled = decoder.sample(sequences, cache, logits, 3, rows)
    for index, text in enumerate(texts):
        own = model.new_cache(1, 64)
        with torch.no_grad():
            last = model(torch.tensor([text]), cache=own)[:, -1:]
            step = partial(model, cache=own)
            expected = sampler.sample_steps([sequences[index]], last, 3, step)
        yield {"found": sampled[index], "expected": expected[0]}
    yield {
        "lengths": cache.lengths,
        "before": lengths,
        "steps": list(decoder._pool_steps),
        "problem": decoder.fused_problem,
    }


@pytest.mark.more
def test_rows_of_a_pool_are_read_and_sampled_where_they_are():
    *results, last = interpret(yield_rows)
    assert last["problem"] == ""
    assert last["steps"] == [4, 2, 1]
    assert last["lengths"] == [before + 2 * (row != 1) for row, before in enumerate(last["before"])]
    for result in results[:3]:
        assert result["error"] < 1e-5
    for result in results[3:]:
        tokens = [token for token, *_ in result["expected"]]
        assert [token for token, *_ in result["found"]] == tokens
    assert len(results) == 6


CASES = [  # prompts, tokens to sample, and parameters
    (["The cat"], 19, {"temperature": 0.0}),
    (["The cat"], 1, {"temperature": 0.7}),
    (["The cat"], 19, {"temperature": 30.0}),
    (["The cat", "a", "xyz"], 18, {"temperature": 0.7}),
    (["a", "bcd"], 3, {"top_k": 5, "logprobs": 2}),
]


def yield_texts():
    model = random_model(1, 0.3, 0.4, vocab_size=301, max_seq_len=64, head_dim=16, qk_norm=True)
    plain, fused = (Generator(model, TOKENIZER, compile=False) for _ in range(2))
    fused.decoder = new_decoder(model)
    for prompts, n_new, options in CASES:
        params = SamplingParams(n_new, seed=n_new, **options)
        known = plain.generate(prompts, params)
        found = fused.generate(prompts, params)
        for ours, theirs in zip(found, known, strict=True):
            yield {
                "tokens": (ours.token_ids, theirs.token_ids),
                "logprobs": (ours.logprobs, theirs.logprobs),
                "reasons": (ours.finish_reason, theirs.finish_reason),
            }
    yield {"problem": fused.decoder.fused_problem, "steps": list(fused.decoder._steps)}


@pytest.mark.more
def test_texts_are_those_of_plain_decoding():
    *results, last = interpret(yield_texts)
    assert last == {"problem": "", "steps": [4, 2]}  # the buffers of a single text were replaced
    assert len(results) == 8
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


@pytest.mark.more
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
    from thinker.generation.decoders.plain_decoder import PlainDecoder
    from thinker.generation.fused.fused_decoder import FusedDecoder

    for options, _ in UNKNOWN:
        options = {"head_dim": 16, **options}
        model = random_model(vocab_size=264, max_seq_len=64, **options)
        yield {"problem": FusedDecoder(PlainDecoder(as_on_a_gpu(model))).fused_problem}


def test_the_kernels_say_what_they_do_not_know():
    problems = [result["problem"] for result in interpret(yield_unknown)]
    for problem, (_, reason) in zip(problems, UNKNOWN, strict=True):
        assert reason in problem


def yield_odd_texts():
    """Texts and errors, plain and fused, where a number overflows or is none."""
    model = random_model(1, 0.3, 0.4, vocab_size=301, max_seq_len=64, head_dim=16, n_layers=1)
    with torch.no_grad():
        model.embedding.weight[ord("z")] = math.nan  # of no token that the proof reads
    plain, fused = (Generator(model, TOKENIZER, compile=False) for _ in range(2))
    fused.decoder = new_decoder(model)
    for prompts, temperature in ((["a"], 1e100), (["az"], 0.0), (["a", "z"], 0.0), (["az"], 1.0)):
        params = SamplingParams(3, temperature=temperature, seed=3)
        results = []
        for generator in (plain, fused):
            try:
                results.append([each.token_ids for each in generator.generate(prompts, params)])
            except RunError as error:
                results.append(str(error))
        yield {"plain": results[0], "fused": results[1], "problem": fused.decoder.fused_problem}


def test_extreme_temperatures_and_nan_are_those_of_plain_decoding():
    """A greedy choice among NaN would be an id beyond the embedding, which the next step reads."""
    results = interpret(yield_odd_texts)
    for result in results:
        assert result["problem"] == ""
        assert result["fused"] == result["plain"]
    texts = [isinstance(result["plain"], list) for result in results]
    assert texts == [True, False, False, False]
    assert "non-finite" in results[1]["plain"]


def yield_hooks_weights_and_memory():
    model = random_model(1, 0.3, 0.4, vocab_size=264, max_seq_len=64, head_dim=16, n_layers=1)
    plain, fused = (Generator(model, TOKENIZER, compile=False) for _ in range(2))
    fused.decoder = new_decoder(model)
    params = SamplingParams(3, temperature=0, logit_bias=NO_END)
    known = plain.generate(["ab"], params)[0].token_ids
    for _ in range(2):
        fused.generate(["ab"], params)
    seen = []
    block = fused.model.blocks[0]
    hook = block.register_forward_hook(lambda *_: seen.append(1))
    found = fused.generate(["ab"], params)[0].token_ids
    hook.remove()
    yield {"same": found == known, "passes": len(seen), "problem": fused.decoder.fused_problem}

    for generator in (plain, fused):
        numbers = torch.Generator().manual_seed(5)
        down = generator.model.blocks[0].mlp.down_proj
        down.weight.data = torch.randn(down.weight.shape, generator=numbers)
        gain = torch.rand(down.weight.shape[0], generator=numbers)
        generator.model.norm.weight = torch.nn.Parameter(gain, requires_grad=False)
    before = known
    known = plain.generate(["ab"], params)[0].token_ids
    assert known != before
    found = fused.generate(["ab"], params)[0].token_ids
    yield {"same": found == known, "problem": fused.decoder.fused_problem}

    from thinker.generation.fused import fused_decoder

    def fail(*_):
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")

    fused_decoder.CacheBuffers = fail
    found = fused.generate(["ab", "ab"], params)[0].token_ids
    decoder = fused.decoder
    is_free = decoder._buffers is None and not decoder._steps
    yield {"same": found == known, "is_free": is_free, "report": decoder.report()}


def test_hooks_and_new_weights_take_effect_and_missing_memory_ends_no_text():
    hooked, edited, crowded = interpret(yield_hooks_weights_and_memory)
    assert edited == {"same": True, "problem": ""}
    assert hooked == {"same": True, "passes": 3, "problem": ""}
    assert crowded["same"]
    assert crowded["is_free"]
    assert crowded["report"].endswith("the kernels failed: CUDA out of memory.")


def yield_flat_distributions():
    """Whether steps prove themselves beside a sampler that draws a token a bit later."""
    model = random_model(
        1, vocab_size=4099, max_seq_len=64, head_dim=16, n_layers=1, tie_embeddings=False
    )
    torch.nn.init.zeros_(model.lm_head.weight)
    plain = sampler.sample
    for shift in (0, 1, 30):

        def shifted(logits, params, *rest, shift=shift):
            return plain(logits, params, *rest) + (shift if params.temperature else 0)

        sampler.sample = shifted
        decoder = new_decoder(model)
        decoder.step(torch.tensor([[5]]), decoder.model.new_cache(1, 64))
        yield {"shift": shift, "problem": decoder.fused_problem}


def test_rounding_between_tokens_of_like_probability_is_no_other_sampler():
    problems = {one["shift"]: one["problem"] for one in interpret(yield_flat_distributions)}
    assert problems.pop(30) == "the model computes something else than the kernels"
    assert problems == {0: "", 1: ""}


class BytesMoved:
    """Counts the bytes that kernels read and write, each address once per launch, as the caches of
    a GPU are larger than what a program reads again."""

    def __init__(self):
        from triton.runtime.interpreter import InterpreterBuilder

        self.total = 0
        self.addresses = []
        for name in ("create_masked_load", "create_masked_store"):
            self.watch(InterpreterBuilder, name)

    def watch(self, builder, name):
        plain = getattr(builder, name)
        mask_argument = {"create_masked_load": 1, "create_masked_store": 2}[name]

        def counted(builder, pointers, *rest):
            mask = rest[mask_argument - 1].data
            size = pointers.get_element_ty().primitive_bitwidth // 8
            self.addresses.append((size, pointers.data[mask.astype(bool)]))
            return plain(builder, pointers, *rest)

        setattr(builder, name, counted)

    def run(self, launch):
        self.addresses = []
        launch.run()
        if hasattr(launch, "linear"):  # a product of cuBLAS
            self.total += launch.x.nbytes + launch.out.nbytes + launch.linear.weight.nbytes
        for size in {size for size, _ in self.addresses}:
            of_size = [found.ravel() for own, found in self.addresses if own == size]
            self.total += size * len(numpy.unique(numpy.concatenate(of_size)))


def yield_bytes(n_texts, bits):
    """The bytes that one layer in the shape of the 124M model moves, with an LM head of 2,048
    tokens and 160 keys, and the least possible."""
    os.environ["TRITON_INTERPRET"] = "1"
    shape = {"d_model": 768, "n_heads": 12, "d_ff": 2048, "vocab_size": 2048, "n_layers": 1}
    model = random_model(0, **shape, n_kv_heads=12, max_seq_len=256, tie_embeddings=False)
    fusing = _Fusing(model, torch.bfloat16, bits, False, KINDS)
    fusing.on_cpu = False
    copy = fusing.run()
    from thinker.generation.fused.batch_step import BatchStep
    from thinker.generation.fused.fused_step import FusedStep

    cache = copy.new_cache(n_texts, 256)
    if n_texts == 1:
        step = FusedStep(copy, cache, n_texts, False)
    else:
        step = BatchStep(copy, cache, n_texts)
    step.positions.fill_(160)
    step.rows.copy_(torch.arange(n_texts))
    moved = BytesMoved()
    for launch in step.launches:
        moved.run(launch)
    n_weights = 768 * (3 * 768 + 768 + 3 * 2048 + 2048)
    bytes_per_weight = 2 if bits is None else 1 + 2 / 32  # a scale in bf16 per 32 weights
    per_text = 768 * 2 + 161 * 2 * 768 * 2  # the embedding, the keys and values
    yield {"moved": moved.total, "least": n_weights * bytes_per_weight + n_texts * per_text}


@pytest.mark.more
@pytest.mark.parametrize(("n_texts", "bits"), [(1, None), (1, 8), (16, None)])
def test_a_step_moves_hardly_more_than_weights_and_cache(n_texts, bits):
    (result,) = interpret(yield_bytes, n_texts, bits)
    assert result["least"] <= result["moved"] < 1.15 * result["least"]
