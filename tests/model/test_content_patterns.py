"""retrieve(block, k): which blocks are chosen, ties, what the cache and documents change,
gradients, all options."""

import itertools

import pytest
import torch
from conftest import examples, random_model
from hypothesis import given, settings
from hypothesis import strategies as st
from installed import if_installed

from thinker.data.tokenizers.tokenizer_factory import make_tokenizer
from thinker.generation import Generator, SamplingParams
from thinker.model.attention_dispatch import KERNELS, attend, attention_weights
from thinker.model.masks import MaskBuilder
from thinker.model.patterns.content_patterns import block_scores, complete_blocks
from thinker.model.patterns.pattern import TokenInfo
from thinker.model.patterns.pattern_parser import parse_pattern
from thinker.runtime.errors import UserError

pytestmark = pytest.mark.usefixtures("one_thread")


def plain_mask(q, k, block, n, first=0, documents=None):
    """The definition, query by query: q (B, H, T, D) from position `first` on, k (B, K, S, D) ->
    (B, H, T, S)."""
    (B, H, T, _), (_, K, S, _) = q.shape, k.shape
    visible = torch.zeros(B, H, T, S, dtype=torch.bool)
    for b, h, t in itertools.product(range(B), range(H), range(T)):
        index = first + t
        begin = 0 if documents is None else documents[b].index(documents[b][index])
        own = begin + (index - begin) // block * block
        visible[b, h, t, own : index + 1] = True
        products = []
        for start in range(begin, own, block):
            mean = torch.stack(
                [k[b, h // (H // K), s].double() for s in range(start, start + block)]
            ).mean(0)
            products.append((-float(q[b, h, t].double() @ mean), start))
        for _, start in sorted(products)[:n]:
            visible[b, h, t, start : start + block] = True
    return visible


def mask_of(q, k, text, first=0, documents=None):
    """The mask that a model uses: (B, H, T, S)."""
    S = k.shape[2]
    position, document = torch.arange(S), None
    if documents is not None:
        document = torch.tensor(documents)
        position = torch.tensor([[s - row.index(row[s]) for s in range(S)] for row in documents])
    key = TokenInfo(position, document)
    query = TokenInfo(*(x if x is None else x[..., first:] for x in (position, document)))
    mask = MaskBuilder(q.shape[1], q.dtype).build(parse_pattern(text), query, key, first == 0)
    assert mask.kernel == "sdpa"
    return mask.content_mask(q, k)


@st.composite
def problems(draw):
    """Queries and keys, with equal keys in some, a block size and k, after `first` others, maybe in
    documents."""
    B, K, group, S = (
        draw(st.integers(1, 2)),
        draw(st.integers(1, 2)),
        draw(st.integers(1, 2)),
        draw(st.integers(1, 30)),
    )
    first = draw(st.integers(0, S - 1))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    q = torch.randn(B, K * group, S - first, 4, generator=generator)
    k = torch.randn(B, K, S, 4, generator=generator)
    if draw(st.booleans()):  # keys of zeros or ones, so that products are exact and many are equal
        q, k = q.round(), torch.randint(2, (B, K, S, 1), generator=generator).float().expand_as(k)
    documents = None
    if draw(st.booleans()):
        documents = (torch.rand(B, S, generator=generator) < 0.1).cumsum(1).tolist()
    return q, k, draw(st.sampled_from([1, 2, 4, 8])), draw(st.integers(1, 4)), first, documents


@given(problem=problems(), dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
@settings(max_examples=examples(100), deadline=None)
def test_the_mask_equals_the_definition(problem, dtype):
    q, k, block, n, first, documents = problem
    q, k = q.to(dtype), k.to(dtype)
    found = mask_of(q, k, f"retrieve({block}, {n})", first, documents)
    assert torch.equal(found, plain_mask(q, k, block, n, first, documents))


@given(
    problem=problems(),
    other=st.sampled_from(["global(2)", "window(3)", "topk(2)", "retrieve(3, 1)", "prefix(3)"]),
)
@settings(max_examples=examples(50), deadline=None)
def test_combinations_are_unions_and_intersections(problem, other):
    q, k, block, n, first, documents = problem
    text, H = f"retrieve({block}, {n})", q.shape[1]
    known = plain_mask(q, k, block, n, first, documents)

    def weights(text):
        position = torch.arange(k.shape[2])
        query, key = TokenInfo(position[first:]), TokenInfo(position)
        return (
            attention_weights(
                q, k, MaskBuilder(H).build(parse_pattern(text), query, key, first == 0)
            )
            > 0
        )

    if documents is None:
        alone = weights(other)
        assert torch.equal(weights(f"{text} | {other}"), known | alone)
        assert torch.equal(weights(f"{text} & {other}"), known & alone)
        assert torch.equal(weights(f"heads({text}, {other})")[:, ::2], known[:, ::2])
        assert torch.equal(weights(f"heads({text}, {other})")[:, 1::2], alone[:, 1::2])


def test_among_equal_blocks_the_earlier_one_wins():
    q, k = torch.ones(1, 1, 20, 4), torch.ones(1, 1, 20, 4)
    found = mask_of(q, k, "retrieve(4, 2)")[0, 0]
    assert found[19].nonzero().flatten().tolist() == [*range(8), *range(16, 20)]
    assert torch.equal(mask_of(q[:, :, :1], k, "retrieve(4, 2)", 19)[0, 0, 0], found[19])
    k[:, :, 8:12] *= 1 + 1e-6  # more than fp32's rounding, less than that of bf16
    assert mask_of(q, k, "retrieve(4, 1)")[0, 0, 19].nonzero().flatten().tolist() == [
        *range(8, 12),
        *range(16, 20),
    ]


@torch.no_grad()
def test_products_are_computed_in_fp32_under_autocast():
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 2, 64, 16, generator=generator).bfloat16() for _ in range(2))
    starts, exists, number = complete_blocks(torch.arange(64), 8)
    assert starts.tolist() == [[0, 8, 16, 24, 32, 40, 48, 56]]
    assert exists.all()
    assert number[0].tolist() == [s // 8 for s in range(64)]
    known = q.double() @ k.double().unflatten(2, (8, 8)).mean(3).transpose(-2, -1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = block_scores(q, k, starts, 8)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), known, rtol=1e-5, atol=1e-5)


def test_only_complete_blocks_are_counted():
    """Documents of 5, 3, 8 and 4 tokens in blocks of 4: the second has none, and the third has
    two."""
    position = torch.cat([torch.arange(n) for n in (5, 3, 8, 4)])
    starts, exists, number = complete_blocks(position, 4)
    assert starts[exists].tolist() == [0, 8, 12, 16]
    assert exists.tolist() == [[True, True, True, True, False]]
    assert number[0, [*range(4), *range(8, 20)]].tolist() == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4


def test_gradients_flow_through_the_chosen_keys_alone():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 24, 4, generator=generator).requires_grad_() for _ in range(3))
    position = TokenInfo(torch.arange(24))
    mask = MaskBuilder(2).build(parse_pattern("retrieve(4, 1)"), position, position, aligned=True)
    mask_by_loops = plain_mask(q.detach(), k.detach(), 4, 1)
    attend(q, k, v, mask)[:, :, -1].square().sum().backward()
    for x in (k, v):
        assert torch.equal(x.grad.abs().sum(-1) > 0, mask_by_loops[:, :, -1])
    scores = (q @ k.transpose(-2, -1) / 2).masked_fill(~mask_by_loops, -torch.inf)
    known = torch.autograd.grad((scores.softmax(-1) @ v)[:, :, -1].square().sum(), (q, k, v))
    for x, grad in zip((q, k, v), known):
        torch.testing.assert_close(x.grad, grad)


@torch.no_grad()
def test_with_k_for_all_blocks_it_is_full_attention():
    tokens = torch.randint(61, (2, 30), generator=torch.Generator().manual_seed(0))
    known = random_model()(tokens)
    torch.testing.assert_close(random_model(attention="retrieve(4, 7)")(tokens), known)
    assert not torch.allclose(random_model(attention="retrieve(4, 1)")(tokens), known, atol=1e-2)
    torch.testing.assert_close(
        random_model(attention="retrieve(64, 1)")(tokens), known
    )  # all are in one block


@torch.no_grad()
def test_the_cache_chooses_as_the_full_pass():
    """Prompts of unequal length, then chunks and single tokens: the same keys are visible at every
    position."""
    model = random_model(attention="retrieve(4, 2)", max_seq_len=64)
    tokens = torch.randint(61, (3, 50), generator=torch.Generator().manual_seed(0))
    known = model.attention_weights(tokens) > 0  # (layers, B, H, T, T)
    cache = None
    for row, length in enumerate((5, 17, 8)):
        part = model.new_cache(1)
        model(tokens[row : row + 1, :length], cache=part)
        cache = part if cache is None else (cache.concat_rows(part), cache)[1]
    for chunk in (1, 1, 7, 4, 1, 13):
        index = torch.tensor(cache.lengths)[:, None] + torch.arange(chunk)
        rows = torch.arange(3)[:, None]
        names = [f"blocks.{layer}.attention.weights" for layer in range(2)]
        with model.record(*names) as found:
            model(tokens[rows, index], cache=cache)
        for layer, name in enumerate(names):
            weights = found[name]  # (B, H, chunk, S)
            expected = (
                known[layer].transpose(1, 2)[rows, index].transpose(1, 2)[..., : weights.shape[-1]]
            )
            assert torch.equal(weights > 0, expected)


MIXED = "heads(retrieve(4, 1), window(4)) | global(2)"
OPTIONS = [  # options, dtype of the activations, document masking
    ({"n_kv_heads": 1, "qk_norm": False, "dropout": 0.2}, torch.bfloat16, True),
    pytest.param(
        {"attention": MIXED, "n_kv_heads": 4, "dropout": 0.2},
        torch.bfloat16,
        False,
        marks=pytest.mark.stress,
    ),
    pytest.param(
        {"attention": MIXED, "positions": "alibi"}, torch.float32, True, marks=pytest.mark.stress
    ),
]


@pytest.mark.parametrize(("options", "dtype", "has_documents"), OPTIONS, ids=str)
def test_compiled_blocks_train_as_plain_ones(options, dtype, has_documents):
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(61, (2, 24), generator=generator)
    documents = (torch.rand(2, 24, generator=generator) < 0.1).cumsum(1) if has_documents else None
    results = []
    torch._dynamo.reset()
    for is_compiled in (False, True):
        model = random_model(
            std=0.1, n_layers=1, **{"attention": "retrieve(4, 2)", **options}
        ).train()
        if is_compiled:
            for block in model.blocks:
                block.compile(backend="aot_eager", fullgraph=True)
        torch.manual_seed(1)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            loss, count = model(tokens, targets=tokens, document_ids=documents)
        loss.backward()
        results.append(
            (
                loss / count,
                torch.cat([parameter.grad.flatten() for parameter in model.parameters()]),
            )
        )
    (loss, grad), (compiled_loss, compiled_grad) = results
    rtol = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(compiled_loss, loss, rtol=rtol, atol=0)
    assert grad.isfinite().all()
    assert (compiled_grad - grad).norm() <= 10 * rtol * grad.norm()


def test_kernels_that_cannot_choose_are_refused():
    pattern, position = parse_pattern("retrieve(4, 2)"), TokenInfo(torch.arange(8))
    for kernel in KERNELS:
        builder = MaskBuilder(2, kernel=kernel)
        if kernel in ("auto", "sdpa", "reference"):
            builder.build(pattern, position, position, aligned=True)
        else:
            with pytest.raises(UserError, match=r"does not support retrieve\(4, 2\)"):
                builder.build(pattern, position, position, aligned=True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("retrieve(16)", r"retrieve has 1 arguments; use retrieve\(block, k\)"),
        ("retrieve(0, 2)", "0 is not an integer from 1"),
        ("retrieve(16, 0)", "0 is not an integer from 1"),
        ("retrieve", "has 0 arguments"),
        ("retrieve(16, 2) | linear(8)", "linear cannot be combined"),
        ("retreive(16, 2)", "unknown pattern retreive; did you mean retrieve"),
    ],
)
def test_mistakes(text, message):
    with pytest.raises(UserError, match=message):
        parse_pattern(text)


@pytest.mark.parametrize("options", [{}, *if_installed("speculation", {"speculate": 3})], ids=str)
def test_sampling_with_a_cache_equals_sampling_without(options):
    tokenizer = make_tokenizer("byte", [])
    model = random_model(
        attention=["retrieve(4, 2)", "heads(retrieve(8, 1), full)"], vocab_size=264
    )
    assert not model.config.is_unbounded
    params = SamplingParams(max_new_tokens=20, seed=3, logit_bias={tokenizer.eos_id: -100.0})
    prompts = ["abcabcabcabcabcab", "the", "ab" * 10]
    known = Generator(model, tokenizer, use_cache=False).generate(prompts, params)
    found = Generator(model, tokenizer, **options).generate(prompts, params)
    assert [one.token_ids for one in found] == [one.token_ids for one in known]
