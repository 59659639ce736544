"""Taps: what is kept is what the pass had, and keeping it changes not a bit; what is changed is what an edit says."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_forms import ATTENTION, close, forms

from thinker.generation import Generator, SamplingParams
from thinker.generation.compiled_decode import CompiledThinker
from thinker.generation.inference_model import for_decoding
from thinker.model import attend, linear_attention
from thinker.runtime.errors import UserError

pytestmark = pytest.mark.usefixtures("one_thread")
T = 20


@pytest.fixture
def tokens():
    return torch.randint(0, 61, (2, T), generator=torch.Generator().manual_seed(0))


def widened(x, n_heads):
    return x.repeat_interleave(n_heads // x.shape[1], dim=1)


@pytest.mark.parametrize("attention", ATTENTION, ids=str)
def test_tapped_weights_make_the_output_of_the_fast_path_and_change_no_bit(make_thinker, attention):
    @given(form=forms(attention), length=st.integers(8, 70), seed=st.integers(0, 9))
    @settings(max_examples=15, deadline=None)
    def test(form, length, seed):
        thinker = make_thinker(seed, **form)
        tokens = torch.randint(0, 97, (2, length), generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            plain = thinker(tokens)
            with thinker.tap("*", "blocks.*", "blocks.*.*", "blocks.*.*.*", "blocks.*.attention.heads.*") as seen:
                assert torch.equal(thinker(tokens), plain)
        assert set(seen) == set(thinker.tap_names())
        assert torch.equal(seen["logits"], plain)
        for layer in range(2):
            path = f"blocks.{layer}.attention"
            weights, heads = seen[f"{path}.weights"], seen[f"{path}.heads"]
            known = weights @ widened(seen[f"{path}.v"], 4)
            torch.testing.assert_close(heads, known, rtol=0, atol=1e-5 * max(1, float(known.abs().max())))
            assert torch.equal(torch.stack([seen[f"{path}.heads.{h}"] for h in range(4)], dim=1), heads)
        with torch.no_grad():
            assert torch.equal(thinker(tokens), plain)

    test()


def test_the_parts_add_up_to_the_residual_stream(make_thinker, tokens):
    thinker = make_thinker()
    with thinker.tap("embedding", "blocks.*", "blocks.*.attention", "blocks.*.mlp", "norm", "logits") as seen:
        thinker(tokens)
    x = seen["embedding"]
    for layer in range(2):
        x = x + seen[f"blocks.{layer}.attention"] + seen[f"blocks.{layer}.mlp"]
        close(seen[f"blocks.{layer}"], x)
    close(seen["norm"] @ thinker.head.weight.T, seen["logits"])
    assert list(seen) == [name for name in thinker.tap_names() if name in seen]


def test_nothing_stays(make_thinker, tokens):
    thinker = make_thinker()
    state = set(vars(thinker)), [set(vars(block.attention)) for block in thinker.blocks]

    def fail(x):
        raise ZeroDivisionError

    seen = thinker.tap("blocks.*.attention.weights", "embedding", "blocks.0", "blocks.1.mlp.hidden")
    with pytest.raises(ZeroDivisionError), seen, thinker.edit({"blocks.1.mlp": fail}):
        thinker(tokens)
    assert set(vars(thinker)) - state[0] <= {"_points"}
    assert [set(vars(block.attention)) for block in thinker.blocks] == state[1]
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in thinker.modules())
    assert thinker.kernel == "auto"


def test_with_a_cache_every_step_is_kept(make_thinker, tokens):
    thinker = make_thinker(attention=["full", "window(6)"])
    with thinker.tap("blocks.*.attention.weights", "blocks.1") as whole:
        thinker(tokens)
    cache = thinker.new_cache(2)
    with thinker.tap("blocks.0.attention.weights", "blocks.1") as seen:
        for part in tokens.split([9, 1, 1, 5, 4], dim=1):
            thinker(part, cache=cache)
    steps = seen.passes["blocks.0.attention.weights"]
    assert [step.shape[2:] for step in steps] == [(9, 9), (1, 10), (1, 11), (5, 16), (4, 20)]
    known, at = whole["blocks.0.attention.weights"], 0
    for step in steps:
        close(step, known[:, :, at : at + step.shape[2], : step.shape[3]])
        at += step.shape[2]
    close(torch.cat(seen.passes["blocks.1"], dim=1), whole["blocks.1"])


def test_while_a_generator_writes(make_thinker):
    from thinker.data.tokenizer_factory import make_tokenizer

    tokenizer = make_tokenizer("byte", [])
    thinker = make_thinker(vocab_size=tokenizer.vocab_size)
    generator = Generator(thinker, tokenizer)
    params = SamplingParams(max_new_tokens=5, temperature=0)
    plain = generator.generate(["abcd"], params)
    with generator.thinker.tap("blocks.1.attention.weights") as seen:
        assert generator.generate(["abcd"], params) == plain
    assert [step.shape[2:] for step in seen.passes["blocks.1.attention.weights"]][:2] == [(5, 5), (1, 6)]


# Edits


def zeroed_columns(thinker, layer, head):
    """The same model whose output matrix takes nothing of a head."""
    weight = thinker.blocks[layer].attention.o_proj.weight.detach().clone()
    weight[:, head * 8 : (head + 1) * 8] = 0
    return weight


def test_a_head_made_zero_is_one_whose_columns_are_zero(make_thinker, tokens):
    thinker, other = make_thinker(), make_thinker()
    with torch.no_grad():
        other.blocks[1].attention.o_proj.weight.copy_(zeroed_columns(other, 1, 2))
    with thinker.edit({"blocks.1.attention.heads.2": "zero"}):
        edited = thinker(tokens)
    assert torch.equal(edited, other(tokens))
    assert not torch.equal(edited, thinker(tokens))
    cache = thinker.new_cache(2)
    with thinker.edit({"blocks.1.attention.heads.2": "zero"}):
        close(torch.cat([thinker(part, cache=cache) for part in tokens.split(7, dim=1)], dim=1), edited)


def test_mean_number_tensor_and_function(make_thinker, tokens):
    thinker = make_thinker()
    name = "blocks.0.mlp"
    with thinker.tap(name) as seen:
        thinker(tokens)
    known = seen[name]
    for edit, expected in [
        ("mean", known.mean(dim=(0, 1), keepdim=True).expand_as(known)),
        (0.5, torch.full_like(known, 0.5)),
        (known[:1], known[:1].expand_as(known)),
        (lambda x: 2 * x, 2 * known),
    ]:
        with thinker.edit({name: edit}), thinker.tap(name) as seen:
            thinker(tokens)
        assert torch.equal(seen[name], expected)


def test_weights_that_are_changed_are_what_values_are_summed_by(make_thinker, tokens):
    thinker = make_thinker()
    uniform = torch.ones(T, T).tril() / torch.arange(1, T + 1)[:, None]
    parts = [f"blocks.*.attention.{part}" for part in ("v", "heads", "weights")]
    with thinker.edit({"blocks.*.attention.weights": uniform}), thinker.tap(*parts) as seen:
        thinker(tokens)
    for layer in range(2):
        path = f"blocks.{layer}.attention"
        close(seen[f"{path}.heads"], uniform @ widened(seen[f"{path}.v"], 4))
        assert torch.equal(seen[f"{path}.weights"], uniform.expand(2, 4, T, T))
    with thinker.edit({"blocks.*.attention.weights": lambda weights: weights}):  # the same, by another way
        close(thinker(tokens), make_thinker()(tokens))


def test_those_that_are_opened_later_see_what_earlier_ones_have_changed(make_thinker, tokens):
    thinker = make_thinker()
    with thinker.tap("blocks.0") as before, thinker.edit({"blocks.0": 1.0}), thinker.tap("blocks.0") as after:
        thinker(tokens)
        with thinker.edit({"blocks.0": 2.0}):
            thinker(tokens)
    assert (after["blocks.0"] == 1).all()
    assert not torch.equal(before["blocks.0"], after["blocks.0"])
    with thinker.tap("blocks.0") as plain:
        thinker(tokens)
    assert torch.equal(plain["blocks.0"], before["blocks.0"])


def test_gradients_flow_through_what_is_kept(make_thinker, tokens):
    thinker = make_thinker()
    with thinker.edit({"blocks.0.attention.weights": lambda x: x}), thinker.tap("blocks.0.attention.weights") as seen:
        target = thinker(tokens)[:, -1, 3].sum()
    (gradient,) = torch.autograd.grad(target, seen["blocks.0.attention.weights"])
    assert gradient.shape == (2, 4, T, T)
    assert gradient.abs().sum() > 0


@pytest.mark.parametrize(
    ("names", "changes", "message"),
    [
        (["blocks.7"], {}, "no activation blocks.7; did you mean blocks.1"),
        (["blocks.*.attention.weight"], {}, "did you mean"),
        ([], {"blocks.0.attention.q": "zero"}, "can be seen, not changed"),
        ([], {"blocks.0.attention.heads.4": "zero"}, "no activation"),
    ],
)
def test_names_that_are_none(make_thinker, names, changes, message):
    thinker = make_thinker()
    with pytest.raises(UserError, match=message), thinker.edit(changes) if changes else thinker.tap(*names):
        pass
    with pytest.raises(UserError, match="blocks.0 cannot become 'none'"), thinker.edit({"blocks.0": "none"}):
        thinker(torch.zeros(1, 4, dtype=int))


def test_a_layer_without_keys_has_no_weights_with_a_cache(make_thinker, tokens):
    thinker = make_thinker(attention=["full", "linear(16)"])
    with thinker.tap("blocks.1.attention.weights"), pytest.raises(UserError, match="linear attention keeps no keys"):
        thinker(tokens, cache=thinker.new_cache(2))


def test_what_is_kept_of_a_cache_stays(make_thinker):
    thinker = make_thinker(attention="window(4)")
    path, cache = "blocks.0.attention", thinker.new_cache(1, 40)
    with torch.no_grad(), thinker.tap(f"{path}.v", f"{path}.weights", f"{path}.heads") as seen:
        for token in range(20):
            thinker(torch.tensor([[token]]), cache=cache)
    for v, weights, heads in zip(*(seen.passes[f"{path}.{part}"] for part in ("v", "weights", "heads"))):
        torch.testing.assert_close(weights @ v.repeat_interleave(2, dim=1), heads, rtol=0, atol=1e-5)


def test_what_cannot_be_tapped_or_edited_says_so(make_thinker):
    thinker = make_thinker(vocab_size=300)
    tokens = torch.arange(6)[None]
    with thinker.edit({"blocks.0.mlp": "zero"}):
        with pytest.raises(UserError, match="open that on generator.thinker"):
            for_decoding(thinker)
        with pytest.raises(UserError, match="close that before"):
            copy.deepcopy(thinker)
        with pytest.raises(UserError, match="leave compile out"):
            CompiledThinker(thinker)(tokens[:, :1], thinker.new_cache(1))
    with thinker.tap("logits"), pytest.raises(UserError, match="makes no logits"):
        thinker(tokens, targets=tokens)
    thinker(tokens, targets=tokens)
    assert torch.equal(copy.deepcopy(thinker)(tokens), thinker(tokens))


def test_closing_one_leaves_the_others_open(make_thinker):
    thinker, tokens = make_thinker(), torch.arange(6)[None]
    with thinker.tap("blocks.0") as outer:
        with thinker.edit({"blocks.0.mlp": "zero"}):
            pass
        thinker(tokens)
    assert list(outer) == ["blocks.0"]


def test_the_mean_is_over_texts_and_positions_and_of_weights_over_texts(make_thinker):
    thinker, tokens = make_thinker(), torch.arange(18).reshape(3, 6)
    for name, places in {"heads.1": (0, 1), "heads": (0, 2), "weights": (0,)}.items():
        path = f"blocks.1.attention.{name}"
        with thinker.tap(path) as before:
            thinker(tokens)
        with thinker.edit({path: "mean"}), thinker.tap(path) as after:
            thinker(tokens)
        known = before[path].mean(dim=places, keepdim=True).expand_as(before[path])
        torch.testing.assert_close(after[path], known, rtol=0, atol=1e-6)
        assert (known - before[path]).abs().max() > 1e-3


def test_patterns_that_ask_for_tokens_have_them_in_a_cache_too(make_thinker):
    thinker, tokens = make_thinker(attention="token(3) | window(2)"), torch.tensor([[3, 5, 6, 3, 8, 9, 10, 11]])
    whole = thinker.attention_weights(tokens)
    with torch.no_grad(), thinker.tap("blocks.*.attention.weights") as seen:
        thinker(tokens, cache=thinker.new_cache(1, 16))
    for layer in range(2):
        torch.testing.assert_close(seen[f"blocks.{layer}.attention.weights"], whole[layer], rtol=0, atol=1e-5)


@pytest.mark.parametrize("form", [*ATTENTION, {"softcap": 3.0}, {"sink_logits": True}, {"positions": "alibi"}], ids=str)
def test_how_many_rows_are_weighed_at_a_time_changes_nothing(make_thinker, monkeypatch, form):
    letters = {"window": 8} if form == "LG" else {}
    thinker = make_thinker(**form if isinstance(form, dict) else {"attention": form, **letters})
    tokens = torch.arange(46).reshape(2, 23) * 5 % 61
    with torch.no_grad():
        known = thinker(tokens), thinker.attention_weights(tokens)  # more rows at a time than there are
        for module, rows in ((attend, 1), (attend, 2), (linear_attention, 4)):  # and eight times as many by SDPA
            monkeypatch.setattr(module, "ROWS", rows)
            torch.testing.assert_close(thinker(tokens), known[0], rtol=0, atol=1e-4)
            torch.testing.assert_close(thinker.attention_weights(tokens), known[1], rtol=0, atol=1e-5)
