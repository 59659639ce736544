"""FlexAttention against the reference, as far as a CPU computes it; the rest is in
tests/test_cuda.py."""

import pytest
import torch
import torch.nn.attention.flex_attention as torch_flex

from thinker.model import Thinker, ThinkerConfig
from thinker.model.attention_dispatch import attend
from thinker.model.kernels import flex_attention
from thinker.model.kernels.flex_attention import FlexAttention
from thinker.model.masks import MaskBuilder
from thinker.model.patterns.pattern import TokenInfo
from thinker.model.patterns.pattern_parser import parse_pattern
from thinker.model.positions import alibi_slopes

PATTERNS = [
    "full",
    "window(5)",
    "window(200)",
    "dilated(9, 2)",
    "global(3)",
    "window(3) | global(2)",
    "token(3, 5)",
    "block(4, 2)",
    "strided(7)",
    "random(16, 2, 7)",
    "prefix(140)",
    "heads(window(4), strided(3))",
    "longformer(3, 2, 2)",
    "bigbird(3, 2, 16, 2, 1)",
    "random(2, 1) & window(6)",
]
FEATURES = [
    "",
    "alibi",
    "attn_logit_softcap",
    "sinks",
    "documents",
    "alibi attn_logit_softcap sinks documents",
]


pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


@pytest.fixture(autouse=True)
def _traced_no_more_than_needed(monkeypatch):
    """Uncompiled, torch would trace every call all the same."""
    monkeypatch.setattr(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True, raising=False)


def situation(text, features="", B=2, H=4, K=2, T=150, D=8, dtype=torch.float64, device="cpu"):
    """Queries, keys, values, sinks; and what MaskBuilder and attend() take, by the names of their
    arguments."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"q": (B, H, T, D), "k": (B, K, T, D), "v": (B, K, T, D), "sinks": (H,)}
    inputs = {
        name: torch.randn(shape, generator=generator).to(device, dtype)
        for name, shape in shapes.items()
    }
    position, document, token, pattern = torch.arange(T), None, None, parse_pattern(text)
    if "documents" in features:
        begins = torch.rand(B, T, generator=generator) < 3 / T
        begins[:, 0] = True
        document = begins.cumsum(1)
        position = position - torch.where(begins, position, 0).cummax(1).values
    if pattern.tokens:
        token = torch.randint(12, (B, T), generator=generator)
    tokens = TokenInfo(*(x if x is None else x.to(device) for x in (position, document, token)))
    alibi = (
        alibi_slopes(H, device).to(torch.promote_types(dtype, torch.float32))
        if "alibi" in features
        else None
    )
    if "sinks" not in features:
        del inputs["sinks"]
    return pattern, tokens, inputs, alibi, 1.5 if "attn_logit_softcap" in features else None


def computed(kernel, pattern, tokens, inputs, alibi, attn_logit_softcap):
    q, plain = inputs["q"], attn_logit_softcap is None and "sinks" not in inputs
    mask = MaskBuilder(q.shape[1], q.dtype, alibi, kernel, plain).build(
        pattern, tokens, tokens, True
    )
    assert mask.kernel == kernel
    return attend(q, inputs["k"], inputs["v"], mask, None, attn_logit_softcap, inputs.get("sinks"))


@pytest.mark.parametrize("text", PATTERNS)
def test_every_pattern_equals_the_reference(text):
    given = situation(text, FEATURES[-1])
    torch.testing.assert_close(
        computed("flex", *given), computed("reference", *given), rtol=1e-10, atol=1e-10
    )


@pytest.mark.parametrize(
    ("features", "kv_heads"), [*((features, 1) for features in FEATURES), ("", 4)]
)
def test_every_feature_equals_the_reference_in_fp32(features, kv_heads):
    given = situation("longformer(3, 2, 2)", features, K=kv_heads, dtype=torch.float32)
    torch.testing.assert_close(
        computed("flex", *given), computed("reference", *given), rtol=1e-5, atol=1e-5
    )


def test_a_query_that_sees_nothing_gives_0():
    for features in ("", "sinks"):
        pattern, tokens, inputs, *scores = situation("token(3)", features)
        y = computed("flex", pattern, tokens, inputs, *scores)
        sees_nothing = (tokens.token_id == 3).cumsum(1) == 0  # until the first token 3
        assert sees_nothing.any()
        assert y.transpose(1, 2)[sees_nothing].abs().max() == 0
        assert y.transpose(1, 2)[~sees_nothing].abs().amin((-1, -2)).min() > 0


@pytest.mark.parametrize(
    ("text", "features"),
    [*(("bigbird(3, 2, 16, 2, 1)", each) for each in FEATURES), ("token(3)", FEATURES[-1])],
)
def test_gradients_equal_the_references(text, features, monkeypatch):
    """torch refuses gradients on a CPU, although it has the formulas; the gradients of sinks and
    soft-cap are ours."""
    monkeypatch.setattr(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", False, raising=False)
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *tensors: None)
    pattern, tokens, inputs, *scores = situation(text, features, T=40)
    inputs = {name: x.requires_grad_() for name, x in inputs.items()}
    grads = []
    for kernel in ("flex", "reference"):
        y = computed(kernel, pattern, tokens, inputs, *scores)
        weight = torch.arange(y.numel(), dtype=y.dtype).view_as(y).sin()
        grads.append(torch.autograd.grad((y * weight).sum(), list(inputs.values())))
    for mine, right in zip(*grads):
        torch.testing.assert_close(mine, right, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("text", PATTERNS)
@pytest.mark.parametrize("features", ["", "documents"])
def test_tables_of_blocks_hold_what_the_pattern_leaves(text, features, monkeypatch):
    """A GPU computes what they name, and nothing else; a CPU ignores them."""
    size, H = 32, 4
    T = 3 * size - 12  # the last block is not full
    monkeypatch.setattr(flex_attention, "BLOCK", size)
    pattern, tokens, *_ = situation(text, features, H=H, T=T)
    mask = MaskBuilder(H, kernel="reference").build(
        pattern, tokens, tokens
    )  # not aligned: a mask for every pattern
    seen = torch.nn.functional.pad(mask.allowed.expand(2, H, T, T), (0, 12, 0, 12))
    count = seen.unflatten(3, (3, size)).unflatten(2, (3, size)).sum((3, 5))  # (B, H, 3, 3)
    for scores in (1, 2**26):  # a row of blocks at a time, and all together
        monkeypatch.setattr(flex_attention, "MAX_SCORES", scores)
        blocks = FlexAttention(pattern, tokens, H, None).block_mask
        assert blocks.shape[-2:] == (T, T)
        assert list(blocks.BLOCK_SIZE) == [size, size]
        assert blocks.shape[1] == (H if pattern.by_head else 1)
        some = named(blocks.kv_num_blocks, blocks.kv_indices)
        whole = named(blocks.full_kv_num_blocks, blocks.full_kv_indices)
        assert torch.equal(some.expand(2, H, 3, 3), (count > 0) & (count < size**2))
        assert torch.equal(whole.expand(2, H, 3, 3), count == size**2)
        assert torch.equal(named(blocks.q_num_blocks, blocks.q_indices), some.mT)
        assert torch.equal(named(blocks.full_q_num_blocks, blocks.full_q_indices), whole.mT)


def test_random_blocks_are_the_same_where_heads_are_counted_in_32_bits():
    """As the kernel counts them; the hash overflows 32 bits from the eleventh on, and keeps those
    that it needs."""
    pattern, tokens, *_ = situation("random(16, 3, 7)", H=16)
    mask = FlexAttention(pattern, tokens, 16, None).block_mask.mask_mod
    b, h, at = torch.tensor(0), torch.arange(16)[:, None, None], torch.arange(150)
    seen = mask(b, h, at[:, None], at)
    assert torch.equal(mask(b.int(), h.int(), at[:, None].int(), at.int()), seen)
    assert torch.equal(seen[12], pattern(torch.tensor(12), TokenInfo(at[:, None]), TokenInfo(at)))


def named(number, indices):
    """(..., rows), (..., rows, columns) -> (..., rows, columns) bool."""
    first = torch.arange(indices.shape[-1]) < number[..., None]
    return torch.zeros_like(first).scatter(-1, indices.long(), first)


def test_a_compiled_program_serves_every_length_and_keeps_the_patterns_numbers(monkeypatch):
    """As on a GPU, but for the last step: here the compiler hands over what it read, and that runs
    as it is."""
    monkeypatch.setattr(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", False, raising=False)
    programs = []

    def backend(program, _):
        programs.append(program)
        return program

    torch._dynamo.reset()
    compile_ = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda function, **options: compile_(function, backend=backend, **options)
    )
    flex_attention._compiled.cache_clear()
    compiled = flex_attention._compiled()
    monkeypatch.setattr(
        flex_attention, "flex_attention", compiled
    )  # a CPU's calls go the GPU's way
    lengths = {
        "window(5)": (40, 50, 60),
        "window(9)": (40,),
        **{f"dilated(9, {d})": (40,) for d in range(1, 8)},
    }
    for text, T in [(name, T) for name, several in lengths.items() for T in several]:
        given = situation(text, "documents", T=T, dtype=torch.float32)
        torch.testing.assert_close(
            computed("flex", *given), computed("reference", *given), rtol=1e-5, atol=1e-5
        )
    # The first pattern's first length, then any length of each: more than torch would compile
    # unasked.
    assert len(programs) == 1 + len(lengths) > 8
    nodes = [
        node for program in programs for part in program.children() for node in part.graph.nodes
    ]
    captured = [node.meta["example_value"] for node in nodes if node.op == "placeholder"]
    assert {int(x) for x in captured if not isinstance(x, torch.Tensor)} == {
        40,
        50,
    }  # lengths; numbers are constants
    flex_attention._compiled.cache_clear()
    torch._dynamo.reset()


def test_a_compiled_block_leaves_it_to_its_own_program():
    shape = {"vocab_size": 31, "d_model": 32, "n_layers": 2, "n_heads": 2, "max_seq_len": 64}
    model, programs = Thinker(ThinkerConfig(**shape, attention="bigbird(3, 2, 16, 2)")).eval(), []

    def backend(program, _):
        programs.append(program)
        return program

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.2)
        tokens = torch.randint(31, (2, 64))
        model.kernel = "reference"
        known = model(tokens)
        model.kernel = "flex"
        for block in model.blocks:
            block.compile(backend=backend)
        torch.testing.assert_close(model(tokens), known)
    names = {str(node.target) for program in programs for node in program.graph.nodes}
    assert programs
    assert not any("flex" in name for name in names)
