"""Every form of attention in a whole model: what a cache gives back, documents side by side, what
is refused."""

import copy

import pytest
import torch
from conftest import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from thinker.model import Thinker, ThinkerConfig
from thinker.model.kernels.linear_attention import LinearState
from thinker.model.kv_cache import LayerCache, RingLayer
from thinker.runtime.errors import UserError

ATTENTION = ["full", "window(5)", "dilated(9, 2)", "window(4) | global(3)", "token(3, 7)", "block(4, 2)", "strided(4)",
             "longformer(3, 3, 2)", "bigbird(3, 2, 4, 1)", "prefix(6)", "topk(4)", "retrieve(4, 2)", "linear(16)",
             "heads(window(3), full)", "heads(retrieve(3, 1), topk(3)) | global(2)",
             "window(7) & strided(3)", ["window(4)", "linear(8)"], "LG"]  # fmt: skip
POSITIONS = ["rope", "alibi", "relative", "learned", "sinusoidal", "none"]
MORE = [
    {},
    {"attn_logit_softcap": 2.0},
    {"attention_sinks": True},
    {"qk_norm": False},
    {"attention_bias": True},
]
MORE += [{"no_rope_layers": [1]}, {"token_shift": True}]
MORE += [{"value_embeddings": True, "bigram_rows": 23}]


def goes_together(attention, positions, more):
    if "no_rope_layers" in more and positions != "rope":
        return False
    return "linear" not in str(attention) or (
        positions not in ("alibi", "relative")
        and not {"attn_logit_softcap", "attention_sinks"} & more.keys()
    )


@st.composite
def forms(draw, attention):
    """Arguments of random_model for a form of attention with any positions and stabilisers it goes
    with."""
    positions, more = draw(st.sampled_from(POSITIONS)), draw(st.sampled_from(MORE))
    if not goes_together(attention, positions, more):
        positions, more = "rope", {}
    more = more | ({"window": 6} if attention == "LG" else {})
    heads = {"n_heads": 4, "n_kv_heads": draw(st.sampled_from([4, 2, 1]))}
    return {
        "attention": attention,
        "positions": positions,
        "max_seq_len": 80,
        "vocab_size": 97,
        **heads,
        **more,
    }


def draw_tokens(rows, length, seed):
    """No token twice: without positions, equal ones have equal scores, and which is the k-th is for
    rounding to say."""
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(97, generator=generator)[:length] for _ in range(rows)])


def close(ours, known):
    torch.testing.assert_close(ours, known, rtol=0, atol=2e-5 * max(1.0, float(known.abs().max())))


@pytest.mark.parametrize("attention", ATTENTION, ids=str)
def test_cached_equals_full_at_every_position_for_any_chunks(random_model, attention, one_thread):
    @given(
        form=forms(attention),
        chunks=st.lists(st.one_of(st.just(1), st.integers(1, 12)), min_size=1, max_size=16),
        batch=st.integers(1, 3),
        seed=st.integers(0, 9),
    )
    @settings(max_examples=examples(20), deadline=None)
    def test(form, chunks, batch, seed):
        model = random_model(seed, **form)
        chunks = [max(chunks[0], model.config.prefix), *chunks[1:]]
        length = min(80, sum(chunks))
        tokens = draw_tokens(batch, length, seed)
        with torch.no_grad():
            full = model(tokens)
        cache = model.new_cache(batch, 80)
        size, at, pieces = cache.nbytes, 0, []
        for chunk in chunks:
            if at < length:
                pieces.append(model(tokens[:, at : at + chunk], cache=cache))
                at += chunk
        close(torch.cat(pieces, dim=1), full)
        assert cache.nbytes == size

    test()


@pytest.mark.parametrize("attention", ATTENTION, ids=str)
def test_rows_of_unequal_length_go_on_as_if_alone(random_model, attention, one_thread):
    """Each row is read alone and joined to the others; chunks of any size follow, and rows leave
    and are doubled."""

    @given(
        form=forms(attention),
        lengths=st.lists(st.integers(1, 30), min_size=2, max_size=4),
        chunks=st.lists(st.one_of(st.just(1), st.integers(1, 9)), min_size=1, max_size=6),
        kept=st.randoms(use_true_random=False),
        seed=st.integers(0, 9),
    )
    @settings(max_examples=examples(15), deadline=None)
    def test(form, lengths, chunks, kept, seed):
        model = random_model(seed, **form)
        lengths = [max(length, model.config.prefix) for length in lengths]
        tokens = draw_tokens(len(lengths), 80, seed)
        with torch.no_grad():
            full = model(tokens)
        cache = None
        for row, length in enumerate(lengths):
            part = model.new_cache(1, 80)
            model(tokens[row : row + 1, :length], cache=part)
            if cache is None:
                cache = part
            else:
                cache.concat_rows(part)
        rows = list(range(len(lengths)))
        for number, chunk in enumerate(chunks):
            chunk = min(chunk, 80 - max(cache.lengths))
            if chunk < 1:
                break
            at = torch.tensor(cache.lengths)[:, None] + torch.arange(chunk)  # (B, T)
            index = torch.tensor(rows)[:, None]
            close(model(tokens[index, at], cache=cache), full[index, at])
            if number == len(chunks) // 2:
                chosen = [kept.randrange(len(rows)) for _ in range(kept.randint(1, 3))]
                cache.select(chosen)
                rows = [rows[row] for row in chosen]

    test()


@given(
    attention=st.sampled_from(["window(5)", "window(4) | global(3)", "dilated(6, 2)", "LG"]),
    slack=st.integers(0, 6),
    steps=st.lists(st.tuples(st.integers(1, 7), st.integers(0, 6)), min_size=1, max_size=12),
    seed=st.integers(0, 9),
)
@settings(max_examples=examples(40), deadline=None)
def test_a_ring_goes_back_as_far_as_it_has_slack(
    random_model, one_thread, attention, slack, steps, seed
):
    """Chunks are appended and partly taken back, over and over, as drafts are that fail; what comes
    is always right."""
    more = {"window": 5, "token_shift": True} if attention == "LG" else {}
    model = random_model(seed, attention=attention, max_seq_len=80, **more)
    generator = torch.Generator().manual_seed(seed)
    cache, text = model.new_cache(1, 80, slack=slack), torch.zeros(1, 0, dtype=torch.long)
    for chunk, back in steps:
        text = torch.cat((text, torch.randint(0, 61, (1, chunk), generator=generator)), dim=1)
        if text.shape[1] > 80:
            break
        with torch.no_grad():
            known = model(text)[:, -chunk:]
        close(model(text[:, -chunk:], cache=cache), known)
        back = min(back, slack, text.shape[1] - 1)
        if cache.high_water[0] - (text.shape[1] - back) > slack:
            back = 0  # it went further once, and has not come there again
        text = text[:, : text.shape[1] - back]
        cache.truncate([text.shape[1]])


def test_what_a_cache_keeps_follows_the_pattern(random_model):
    model = random_model(
        n_layers=4, attention=["full", "window(8)", "window(8) | global(2)", "linear(16)"]
    )
    layers = model.new_cache(2, 50, slack=3).layers
    assert [type(layer) for layer in layers] == [LayerCache, RingLayer, RingLayer, LinearState]
    assert [layer.size for layer in layers[1:3]] == [8 + 3, 8 + 3 + 2]
    assert layers[0].keys.shape[2] == 50
    assert layers[3].sums.shape == (2, 2, 16, 9)  # (B, K, m, D + 1)
    short = model.new_cache(2, 6).layers  # a ring would hold more than there is room for
    assert [type(layer) for layer in short] == [LayerCache, LayerCache, LayerCache, LinearState]


@pytest.mark.parametrize(
    "attention", ["window(16)", "window(8) | global(4)", "linear(8)", ["window(4)", "linear(8)"]]
)
def test_memory_does_not_grow_where_the_distance_is_bounded(random_model, attention, stress):
    model = random_model(attention=attention, positions="none", token_shift=True)
    tokens = torch.randint(0, 61, (1, 1024), generator=torch.Generator().manual_seed(0))
    cache = model.new_cache(1, 64)
    size = cache.nbytes
    n_chunks = 64 if stress else 8  # of 1024 tokens
    for _ in range(n_chunks):
        model(tokens, cache=cache, last_logits_only=True)
        assert cache.nbytes == size
    assert cache.lengths == [1024 * n_chunks]
    assert cache.is_unbounded
    assert not random_model(attention="strided(4)").new_cache(1, 64).is_unbounded


@torch.no_grad()
def test_an_unbounded_cache_keeps_the_token_before(random_model):
    model = random_model(attention="window(4)", positions="none", token_shift=True)
    tokens = torch.randint(0, 61, (2, 60), generator=torch.Generator().manual_seed(0))
    cache = model.new_cache(2, 10)
    chunks = tokens.split([12, 1, 20, 1, 3, 10, 13], dim=1)  # some are longer than the cache
    close(torch.cat([model(chunk, cache=cache) for chunk in chunks], dim=1), model(tokens))
    with pytest.raises(UserError, match="token_shift with a cache needs token ids"):
        model(embeddings=torch.zeros(2, 1, 32), cache=cache)


def test_a_ring_that_has_turned_refuses_to_go_further_back_than_its_slack(random_model):
    model = random_model(attention="window(8)")
    cache = model.new_cache(1, 60, slack=2)
    model(torch.zeros(1, 30, dtype=torch.long), cache=cache)
    cache.truncate([28])
    assert cache.can_truncate([28])
    assert not cache.can_truncate([27])
    with pytest.raises(
        UserError, match=r"the window has been overwritten; use a larger new_cache\(slack=...\)"
    ):
        cache.truncate([27])
    assert cache.lengths == [28]
    linear = random_model(attention="linear(8)")
    cache = linear.new_cache(1, 60)
    linear(torch.zeros(1, 3, dtype=torch.long), cache=cache)
    cache.truncate([3])
    with pytest.raises(UserError, match="cannot forget keys"):
        cache.truncate([2])


def test_a_prefix_comes_whole_or_not_at_all(random_model):
    model = random_model(attention="prefix(6)")
    tokens = torch.randint(0, 61, (2, 12))
    cache = model.new_cache(2, 12)
    with pytest.raises(UserError, match="pass the first 6 positions"):
        model(tokens[:, :5], cache=cache)
    assert cache.lengths == [0, 0]
    model(tokens[:, :6], cache=cache)
    model(tokens[:, 6:7], cache=cache)


def test_no_loss_is_counted_inside_a_prefix(random_model):
    """What position 5 of a prefix of 6 predicts is the first token that it does not see."""
    model = random_model(attention="prefix(6)")
    tokens = torch.randint(0, 61, (2, 13), generator=torch.Generator().manual_seed(0))
    loss, count = model(tokens[:, :-1], targets=tokens[:, 1:])
    logprobs = (
        model(tokens[:, :-1]).log_softmax(-1).gather(2, tokens[:, 1:, None])[..., 0]
    )  # (B, T)
    assert count == 2 * (12 - 5)
    torch.testing.assert_close(loss, -logprobs[:, 5:].sum())
    changed = tokens.clone()
    changed[:, 7:] = 0
    assert torch.equal(model(changed[:, :-1])[:, :7], model(tokens[:, :-1])[:, :7])


@pytest.mark.parametrize("attention", [a for a in ATTENTION if a != "prefix(6)"], ids=str)
def test_isolated_documents_have_the_logits_that_they_have_alone(
    random_model, attention, one_thread
):
    @given(
        form=forms(attention),
        lengths=st.lists(st.integers(1, 40), min_size=1, max_size=5),
        seed=st.integers(0, 9),
    )
    @settings(max_examples=examples(15), deadline=None)
    def test(form, lengths, seed):
        while sum(lengths) > 80:
            lengths.pop()
        model = random_model(seed, **form)
        tokens = draw_tokens(2, sum(lengths), seed)
        documents = (
            torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).expand(2, -1)
            + 3
        )
        with torch.no_grad():
            packed = model(tokens, document_ids=documents)
            alone = [model(document) for document in tokens.split(lengths, dim=1)]
        close(packed, torch.cat(alone, dim=1))

    test()


def test_rows_may_have_their_borders_in_different_places(random_model):
    model = random_model(attention="window(5) | global(2)", positions="learned")
    tokens = torch.randint(0, 61, (2, 12), generator=torch.Generator().manual_seed(1))
    documents = torch.tensor([[0] * 5 + [1] * 7, [4] * 9 + [9] * 3])
    with torch.no_grad():
        packed = model(tokens, document_ids=documents)
        for row, border in ((0, 5), (1, 9)):
            for part in (slice(0, border), slice(border, 12)):
                close(packed[row, part], model(tokens[row : row + 1, part])[0])
    with pytest.raises(UserError, match="cannot be combined with a cache"):
        model(tokens, document_ids=documents, cache=model.new_cache(2, 12))


@pytest.mark.parametrize("attention", ATTENTION, ids=str)
def test_a_later_token_changes_no_earlier_logit(random_model, attention):
    model = random_model(attention=attention, **({"window": 6} if attention == "LG" else {}))
    tokens = torch.randint(0, 61, (1, 30), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[:, 20:] = (changed[:, 20:] + 1) % 61
    assert torch.equal(model(tokens)[:, :20], model(changed)[:, :20])
    assert not torch.equal(model(tokens)[:, 20:], model(changed)[:, 20:])


@pytest.mark.parametrize("attention", ATTENTION, ids=str)
def test_weights_are_those_of_the_forward_pass(random_model, attention):
    more = {"window": 6} if attention == "LG" else {}
    model = random_model(attention=attention, **more)
    tokens = torch.randint(0, 61, (2, 20), generator=torch.Generator().manual_seed(0))
    weights = model.attention_weights(tokens)
    torch.testing.assert_close(weights.sum(-1), (weights.sum(-1) > 0).float(), rtol=0, atol=1e-5)
    first = model.blocks[0].attention
    seen = {}
    hook = first.register_forward_hook(lambda module, args, out: seen.update(args=args, out=out))
    model(tokens)
    hook.remove()
    v = first.project(seen["args"][0], seen["args"][1])[2].repeat_interleave(
        2, dim=1
    )  # (B, H, T, D)
    close((weights[0] @ v).transpose(1, 2).flatten(2) @ first.o_proj.weight.T, seen["out"])


def test_sinks_take_their_share_of_the_weights(random_model):
    model = random_model(attention_sinks=True)
    tokens = torch.randint(0, 61, (1, 9))
    assert (model.attention_weights(tokens).sum(-1) < 1).all()
    with torch.no_grad():
        for block in model.blocks:
            block.attention.sinks.fill_(-1e9)
    sums = model.attention_weights(tokens).sum(-1)
    torch.testing.assert_close(sums, torch.ones_like(sums))
    plain = random_model()
    plain.load_state_dict({k: v for k, v in model.state_dict().items() if not k.endswith("sinks")})
    close(model(tokens), plain(tokens))


def test_a_cap_beyond_all_scores_changes_nothing(random_model):
    model = random_model(attn_logit_softcap=1e6)
    plain = random_model()
    tokens = torch.randint(0, 61, (1, 9))
    torch.testing.assert_close(model(tokens), plain(tokens), rtol=0, atol=1e-3)


def test_positions_are_known_in_every_way_but_one(random_model):
    """Without positions, full attention on the last token knows its predecessors as a set alone."""
    tokens = torch.tensor([[1, 2, 3, 4, 5, 6]])
    shuffled = tokens[:, [3, 0, 4, 1, 2, 5]]
    for positions in POSITIONS:
        model = random_model(n_layers=1, positions=positions)
        same = torch.allclose(model(tokens)[:, -1], model(shuffled)[:, -1], atol=1e-5)
        assert same == (positions == "none"), positions


def test_learned_positions_end(random_model):
    model = random_model(positions="learned", max_seq_len=8)
    with pytest.raises(UserError, match="8 learned positions"):
        model(torch.zeros(1, 9, dtype=torch.long))
    cache = model.new_cache(1, 20)
    model(torch.zeros(1, 6, dtype=torch.long), cache=cache)
    with pytest.raises(UserError, match="8 learned positions"):
        model(torch.zeros(1, 3, dtype=torch.long), cache=cache)
    assert cache.lengths == [6]


def test_tokens_that_are_asked_for_do_not_come_as_embeddings(random_model):
    model = random_model(attention="token(5) | window(3)")
    x = model.embedding(torch.arange(9)[None])
    for options in ({}, {"cache": model.new_cache()}):
        with pytest.raises(UserError, match="embeddings have no ids"):
            model(embeddings=x, **options)


@pytest.mark.parametrize("attention", ["linear(8)", "window(4) | global(2)"])
def test_documents_may_have_any_numbers(random_model, attention):
    model, tokens = random_model(attention=attention), torch.arange(9)[None]
    plain = model(tokens, document_ids=torch.tensor([[0] * 3 + [1] * 4 + [2] * 2]))
    odd = model(tokens, document_ids=torch.tensor([[1 << 60] * 3 + [-5] * 4 + [1 << 60] * 2]))
    assert torch.equal(plain, odd)
    with pytest.raises(
        UserError, match=r"document_ids is \(1, 8\); it must be a tensor of shape \(1, 9\)"
    ):
        model(tokens, document_ids=torch.zeros(1, 8, dtype=int))


def test_angles_that_depend_on_the_length_do_not_go_with_several_documents(random_model):
    model = random_model(rope_scaling={"type": "dynamic", "factor": 2.0, "original_max_seq_len": 8})
    model(torch.zeros(1, 8, dtype=int), document_ids=torch.zeros(1, 8, dtype=int))
    with pytest.raises(UserError, match="masked documents"):
        model(torch.zeros(1, 9, dtype=int), document_ids=torch.zeros(1, 9, dtype=int))


def test_a_text_without_end_has_no_table_of_angles_without_end(random_model, monkeypatch):
    monkeypatch.setattr("thinker.model.positions.MAX_TABLE_LEN", 32)
    model, tokens = random_model(attention="window(8)"), torch.arange(120)[None] % 61
    whole = random_model(attention="window(8)")(tokens)  # a model with a table of its own
    cache, logits = model.new_cache(1, 10), []
    for chunk in tokens.split([20, 5, *[1] * 45, 50], dim=1):
        logits.append(model(chunk, cache=cache))
    torch.testing.assert_close(torch.cat(logits, dim=1), whole, rtol=1e-4, atol=1e-4)
    assert len(model.rope.table[0]) <= 50


def test_far_keys_alone_are_told_apart_in_16_bits(random_model):
    """What is subtracted for a distance of 400 would be rounded to whole numbers."""
    model = random_model(attention="global(4)", positions="alibi", max_seq_len=512)
    tokens = torch.arange(400)[None] % 61
    model.activation_dtype = torch.bfloat16
    with torch.no_grad():
        logits = model(tokens).float()
        model.kernel = "reference"
        exact = model(tokens).float()
    assert (logits - exact).abs().mean() < 0.25 * 0.045  # which it was before


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"attention": "windows(4)"}, r"unknown pattern windows; did you mean window\?"),
        ({"attention": "window"}, r"window has 0 arguments; use window\(w\)"),
        ({"attention": "window(0)"}, "0 is not an integer from 1"),
        ({"attention": "window(4.5)"}, "4.5 is not an integer"),
        ({"attention": "window(w=4)"}, "is not a pattern"),
        ({"attention": "window(4) + full"}, "is not a pattern"),
        ({"attention": "window(4) |"}, "is not a valid pattern"),
        ({"attention": ""}, "is not a valid pattern"),
        ({"attention": "(" * 5000}, "5,000 characters"),
        ({"attention": "(" * 500 + "full" + ")" * 490}, "is not a valid pattern"),
        ({"attention": "__import__('os')"}, "is not a valid pattern"),
        ({"attention": "linear(8) | window(4)"}, "cannot be combined"),
        ({"attention": "heads(linear(8))"}, "whole layers"),
        ({"attention": "heads()"}, "at least one"),
        ({"attention": "heads(full, full, full, full, full)"}, "more heads than model.n_heads = 4"),
        ({"attention": []}, "a list of patterns"),
        ({"attention": ["full"] * 3}, "has 3 layers, but model.n_layers is 2"),
        ({"attention": ["full", 3]}, "a list of patterns"),
        ({"attention": "global_(4)"}, "is not a valid pattern"),
        ({"attention": "\uff57indow(4)"}, "is not a valid pattern"),
        ({"attention": "global(4, 5)"}, r"global has 2 arguments; use global\(g\)"),
        ({"attention": "random(4)"}, r"random has 1 arguments; use random\(b, r, seed=0\)"),
        ({"attention": "global(0.5)"}, "0.5 is not an integer"),
        (
            {"attention": "(window(8)) and (global(2))"},
            r"window\(8\) and global\(2\) is not a pattern",
        ),
        ({"attention": "heads(heads(full, window(2)), window(3))"}, "heads cannot be nested"),
        (
            {"attention": "heads(full, heads(full, window(2)) | window(3))"},
            "heads cannot be nested",
        ),
        (
            {"attention": "window(4) | token(3, 61)"},
            r"names token 61, which is not in the vocabulary \(0 to 60\)",
        ),
        ({"attention": "bigbird(4, 2, 4, 300)"}, r"300 \(maximum: 256\)"),
        ({"attention": "LG"}, "needs model.window"),
        ({"attention": "full", "window": 4}, "model.window has no effect"),
        ({"attention": "linear(8)", "attn_logit_softcap": 2.0}, "does not support"),
        ({"attention": "linear(8)", "attention_temperature": 2.0}, "does not support"),
        ({"attention_temperature": 0.0}, "from 0.001 to 1000"),
        ({"attention": "linear(8)", "positions": "alibi"}, "does not support"),
        ({"attention": "linear(8)", "positions": "relative"}, "does not support"),
        ({"positions": "rop"}, "choose from: rope, alibi"),
        (
            {"positions": "none", "rope_scaling": {"type": "linear", "factor": 2}},
            "only with model.positions=rope",
        ),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "model.rope_scaling.factor"),
        ({"attn_logit_softcap": 0.0}, "from 1e-9 to 1e9"),
        ({"attn_logit_softcap": 1e39}, "from 1e-9 to 1e9"),
    ],
)
def test_what_does_not_go_together_is_refused(wrong, says):
    with pytest.raises(UserError, match=says) as caught:
        ThinkerConfig(vocab_size=61, d_model=32, n_layers=2, n_heads=4, **wrong)
    assert "\n" not in str(caught.value)


def test_a_configuration_comes_back_from_json(random_model):
    for values in (
        {"attention": ["full", "linear(4)"]},
        {"rope_scaling": {"type": "linear", "factor": 2}},
    ):
        config = random_model(**values).config
        assert ThinkerConfig.from_dict(config.to_dict()) == config
    with pytest.raises(UserError, match="it must be"):
        ThinkerConfig.from_dict({"vocab_size": 8, "attention": 3})


def test_learning_goes_on_in_every_form(random_model):
    """A gradient reaches every parameter, and it is the same under every kernel that can compute
    it."""
    tokens = torch.randint(0, 61, (1, 31), generator=torch.Generator().manual_seed(0))
    for attention in ATTENTION:
        for positions, more in zip(POSITIONS, [*MORE, {}]):
            if not goes_together(attention, positions, more):
                continue
            form = {"attention": attention, "positions": positions, **more}
            model = random_model(**form, **({"window": 6} if attention == "LG" else {}))
            twin = copy.deepcopy(model)
            twin.kernel = "reference"
            for each in (model, twin):
                each(tokens[:, :-1], targets=tokens[:, 1:])[0].backward()
            for (name, mine), its in zip(model.named_parameters(), twin.parameters()):
                assert mine.grad.abs().sum() > 0, (form, name)
                torch.testing.assert_close(mine.grad, its.grad, rtol=1e-3, atol=1e-3)


def test_forced_kernels_that_cannot_are_refused(random_model):
    model = Thinker(random_model(attention="strided(4)").config)
    model.kernel = "local"
    with pytest.raises(UserError, match=r"the kernel 'local' does not support strided\(4\)"):
        model(torch.zeros(1, 9, dtype=torch.long))
    model.kernel = "fast"
    with pytest.raises(UserError, match="choose from: auto, sdpa"):
        model(torch.zeros(1, 9, dtype=torch.long))
