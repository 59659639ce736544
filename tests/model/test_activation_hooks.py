"""Recorded activations are those of the pass, bit for bit; patched ones are what the patch says."""

import copy

import pytest
import torch
from conftest import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from test_attention_variants import ATTENTION, close, forms

from thinker.generation import Generator, SamplingParams
from thinker.generation.decoders.compiled_decoder import CompiledDecoder
from thinker.generation.decoders.inference_model import fuse_for_inference
from thinker.model import attention, attention_dispatch
from thinker.model.inspection.open_hooks import has_open_hooks
from thinker.runtime.errors import UserError

pytestmark = pytest.mark.usefixtures("one_thread")
T = 20


@pytest.fixture
def tokens():
    return torch.randint(0, 61, (2, T), generator=torch.Generator().manual_seed(0))


def widened(x, n_heads):
    return x.repeat_interleave(n_heads // x.shape[1], dim=1)


@pytest.mark.parametrize("attention", ATTENTION, ids=str)
def test_recorded_weights_make_the_output_of_the_fast_path_and_change_no_bit(
    random_model, attention
):
    @given(form=forms(attention), length=st.integers(8, 70), seed=st.integers(0, 9))
    @settings(max_examples=examples(15), deadline=None)
    def test(form, length, seed):
        model = random_model(seed, **form)
        tokens = torch.randint(0, 97, (2, length), generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            plain = model(tokens)
            with model.record(
                "*", "blocks.*", "blocks.*.*", "blocks.*.*.*", "blocks.*.attention.heads.*"
            ) as seen:
                assert torch.equal(model(tokens), plain)
        assert set(seen) == set(model.activation_names())
        assert torch.equal(seen["logits"], plain)
        for layer in range(2):
            path = f"blocks.{layer}.attention"
            weights, heads = seen[f"{path}.weights"], seen[f"{path}.heads"]
            known = weights @ widened(seen[f"{path}.v"], 4)
            torch.testing.assert_close(
                heads, known, rtol=0, atol=1e-5 * max(1, float(known.abs().max()))
            )
            assert torch.equal(
                torch.stack([seen[f"{path}.heads.{h}"] for h in range(4)], dim=1), heads
            )
        with torch.no_grad():
            assert torch.equal(model(tokens), plain)

    test()


def test_the_parts_add_up_to_the_residual_stream(random_model, tokens):
    model = random_model()
    with model.record(
        "embedding", "blocks.*", "blocks.*.attention", "blocks.*.mlp", "norm", "logits"
    ) as seen:
        model(tokens)
    x = seen["embedding"]
    for layer in range(2):
        x = x + seen[f"blocks.{layer}.attention"] + seen[f"blocks.{layer}.mlp"]
        close(seen[f"blocks.{layer}"], x)
    close(seen["norm"] @ model.lm_head.weight.T, seen["logits"])
    assert list(seen) == [name for name in model.activation_names() if name in seen]


def test_nothing_stays(random_model, tokens):
    model = random_model()
    state = set(vars(model)), [set(vars(block.attention)) for block in model.blocks]

    def fail(x):
        raise ZeroDivisionError

    seen = model.record(
        "blocks.*.attention.weights", "embedding", "blocks.0", "blocks.1.mlp.hidden"
    )
    with pytest.raises(ZeroDivisionError), seen, model.patch({"blocks.1.mlp": fail}):
        model(tokens)
    assert set(vars(model)) - state[0] == set()
    assert [set(vars(block.attention)) for block in model.blocks] == state[1]
    assert not has_open_hooks(model)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert model.kernel == "auto"


def test_with_a_cache_every_step_is_kept(random_model, tokens):
    model = random_model(attention=["full", "window(6)"])
    with model.record("blocks.*.attention.weights", "blocks.1") as whole:
        model(tokens)
    cache = model.new_cache(2)
    with model.record("blocks.0.attention.weights", "blocks.1") as seen:
        for part in tokens.split([9, 1, 1, 5, 4], dim=1):
            model(part, cache=cache)
    steps = seen.passes["blocks.0.attention.weights"]
    assert [step.shape[2:] for step in steps] == [(9, 9), (1, 10), (1, 11), (5, 16), (4, 20)]
    known, at = whole["blocks.0.attention.weights"], 0
    for step in steps:
        close(step, known[:, :, at : at + step.shape[2], : step.shape[3]])
        at += step.shape[2]
    close(torch.cat(seen.passes["blocks.1"], dim=1), whole["blocks.1"])


def test_while_a_generator_writes(random_model):
    from thinker.data.tokenizers.tokenizer_factory import make_tokenizer

    tokenizer = make_tokenizer("byte", [])
    model = random_model(vocab_size=tokenizer.vocab_size)
    generator = Generator(model, tokenizer)
    params = SamplingParams(max_new_tokens=5, temperature=0)
    plain = generator.generate(["abcd"], params)
    with generator.model.record("blocks.1.attention.weights") as seen:
        (recorded,) = generator.generate(["abcd"], params)
    assert recorded.token_ids == plain[0].token_ids
    assert recorded.logprobs == pytest.approx(plain[0].logprobs, abs=1e-5)
    assert [step.shape[2:] for step in seen.passes["blocks.1.attention.weights"]][:2] == [
        (5, 5),
        (1, 6),
    ]


# Patches


def zeroed_columns(model, layer, head):
    """The same model whose output matrix takes nothing of a head."""
    weight = model.blocks[layer].attention.o_proj.weight.detach().clone()
    weight[:, head * 8 : (head + 1) * 8] = 0
    return weight


def test_a_head_made_zero_is_one_whose_columns_are_zero(random_model, tokens):
    model, other = random_model(), random_model()
    with torch.no_grad():
        other.blocks[1].attention.o_proj.weight.copy_(zeroed_columns(other, 1, 2))
    with model.patch({"blocks.1.attention.heads.2": "zero"}):
        edited = model(tokens)
    assert torch.equal(edited, other(tokens))
    assert not torch.equal(edited, model(tokens))
    cache = model.new_cache(2)
    with model.patch({"blocks.1.attention.heads.2": "zero"}):
        close(
            torch.cat([model(part, cache=cache) for part in tokens.split(7, dim=1)], dim=1), edited
        )


def test_mean_number_tensor_and_function(random_model, tokens):
    model = random_model()
    name = "blocks.0.mlp"
    with model.record(name) as seen:
        model(tokens)
    known = seen[name]
    for patch, expected in [
        ("mean", known.mean(dim=(0, 1), keepdim=True).expand_as(known)),
        (0.5, torch.full_like(known, 0.5)),
        (known[:1], known[:1].expand_as(known)),
        (lambda x: 2 * x, 2 * known),
    ]:
        with model.patch({name: patch}), model.record(name) as seen:
            model(tokens)
        assert torch.equal(seen[name], expected)


def test_weights_that_are_changed_are_what_values_are_summed_by(random_model, tokens):
    model = random_model()
    uniform = torch.ones(T, T).tril() / torch.arange(1, T + 1)[:, None]
    parts = [f"blocks.*.attention.{part}" for part in ("v", "heads", "weights")]
    with model.patch({"blocks.*.attention.weights": uniform}), model.record(*parts) as seen:
        model(tokens)
    for layer in range(2):
        path = f"blocks.{layer}.attention"
        close(seen[f"{path}.heads"], uniform @ widened(seen[f"{path}.v"], 4))
        assert torch.equal(seen[f"{path}.weights"], uniform.expand(2, 4, T, T))
    with model.patch(
        {"blocks.*.attention.weights": lambda weights: weights}
    ):  # the same, by another way
        close(model(tokens), random_model()(tokens))


def test_those_that_are_opened_later_see_what_earlier_ones_have_changed(random_model, tokens):
    model = random_model()
    with (
        model.record("blocks.0") as before,
        model.patch({"blocks.0": 1.0}),
        model.record("blocks.0") as after,
    ):
        model(tokens)
        with model.patch({"blocks.0": 2.0}):
            model(tokens)
    assert (after["blocks.0"] == 1).all()
    assert not torch.equal(before["blocks.0"], after["blocks.0"])
    with model.record("blocks.0") as plain:
        model(tokens)
    assert torch.equal(plain["blocks.0"], before["blocks.0"])


def test_gradients_flow_through_what_is_kept(random_model, tokens):
    model = random_model()
    with (
        model.patch({"blocks.0.attention.weights": lambda x: x}),
        model.record("blocks.0.attention.weights") as seen,
    ):
        target = model(tokens)[:, -1, 3].sum()
    (gradient,) = torch.autograd.grad(target, seen["blocks.0.attention.weights"])
    assert gradient.shape == (2, 4, T, T)
    assert gradient.abs().sum() > 0


def test_patched_queries_keys_and_values_are_what_is_attended_with(random_model, tokens):
    model, other = random_model(attention=["window(6)", "full"]), tokens.flip(1)
    parts = [f"blocks.1.attention.{part}" for part in ("q", "k", "v")]
    with model.record(*parts) as cache:
        model(other)
    with (
        model.patch(dict(cache)),
        model.record("blocks.1.attention.weights", "blocks.1.attention.heads") as patched,
    ):
        model(tokens)
    q, k, v = (widened(cache[part], 4) for part in parts)
    scores = (q @ k.transpose(2, 3) / 8**0.5).masked_fill(
        ~torch.ones(T, T).bool().tril(), -torch.inf
    )
    close(patched["blocks.1.attention.weights"], scores.softmax(-1))
    close(patched["blocks.1.attention.heads"], scores.softmax(-1) @ v)


def test_scores_are_what_the_weights_are_the_softmax_of_before_and_after_a_patch(
    random_model, tokens
):
    model = random_model(attention=["window(6)", "full"], attention_sinks=True)
    path = "blocks.0.attention"
    with model.record(f"{path}.q", f"{path}.k", f"{path}.scores", f"{path}.weights") as cache:
        model(tokens)
    distance = torch.arange(T)[:, None] - torch.arange(T)
    scores = cache[f"{path}.q"] @ widened(cache[f"{path}.k"], 4).transpose(2, 3) / 8**0.5
    close(
        cache[f"{path}.scores"].exp(),
        scores.masked_fill((distance < 0) | (distance >= 6), -torch.inf).exp(),
    )

    def weights_of(scores):
        sinks = model.blocks[0].attention.sinks.view(1, 4, 1, 1)
        return scores.exp() / (scores.exp().sum(-1, keepdim=True) + sinks.exp())

    close(cache[f"{path}.weights"], weights_of(cache[f"{path}.scores"]))
    with (
        model.patch({f"{path}.scores": lambda scores: 2 * scores}),
        model.record(f"{path}.weights", f"{path}.v", f"{path}.heads") as patched,
    ):
        model(tokens)
    close(patched[f"{path}.weights"], weights_of(2 * cache[f"{path}.scores"]))
    close(patched[f"{path}.heads"], patched[f"{path}.weights"] @ widened(patched[f"{path}.v"], 4))


def test_scores_of_an_attention_that_was_changed_are_refused(random_model, tokens):
    model = random_model()
    plain = model.blocks[0].attention.attend

    def attend(*inputs, **options):
        return 2 * plain(*inputs, **options)

    model.blocks[0].attention.attend = attend
    changed = model(tokens)
    with (
        model.record("blocks.0.attention.scores"),
        pytest.raises(UserError, match=r"attend\(\) of this model was changed"),
    ):
        model(tokens)
    assert model.blocks[0].attention.attend is attend
    assert torch.equal(model(tokens), changed)


@pytest.mark.parametrize(
    ("names", "changes", "message"),
    [
        (["blocks.7"], {}, "no activation blocks.7; did you mean blocks.1"),
        (["blocks.*.attention.weight"], {}, "did you mean"),
        ([], {"blocks.0.attention.heads.4": "zero"}, "no activation"),
    ],
)
def test_names_that_are_none(random_model, names, changes, message):
    model = random_model()
    with (
        pytest.raises(UserError, match=message),
        model.patch(changes) if changes else model.record(*names),
    ):
        pass
    with (
        pytest.raises(UserError, match="the patch for blocks.0 is 'none'"),
        model.patch({"blocks.0": "none"}),
    ):
        model(torch.zeros(1, 4, dtype=int))


def test_a_layer_without_keys_has_no_weights_with_a_cache(random_model, tokens):
    model = random_model(attention=["full", "linear(16)"])
    message = "attention.weights is not available with this kind of cache"
    with model.record("blocks.1.attention.weights"), pytest.raises(UserError, match=message):
        model(tokens, cache=model.new_cache(2))


def test_what_is_kept_of_a_cache_stays(random_model):
    model = random_model(attention="window(4)")
    path, cache = "blocks.0.attention", model.new_cache(1, 40)
    with torch.no_grad(), model.record(f"{path}.v", f"{path}.weights", f"{path}.heads") as seen:
        for token in range(20):
            model(torch.tensor([[token]]), cache=cache)
    for v, weights, heads in zip(
        *(seen.passes[f"{path}.{part}"] for part in ("v", "weights", "heads"))
    ):
        torch.testing.assert_close(
            weights @ v.repeat_interleave(2, dim=1), heads, rtol=0, atol=1e-5
        )


def test_what_cannot_be_recorded_or_patched_says_so(random_model):
    model = random_model(vocab_size=300)
    tokens = torch.arange(6)[None]
    with model.patch({"blocks.0.mlp": "zero"}):
        with pytest.raises(UserError, match="patch generator.model"):
            fuse_for_inference(model)
        with pytest.raises(UserError, match="close the hooks first"):
            copy.deepcopy(model)
        with pytest.raises(UserError, match="use compile=False"):
            CompiledDecoder(model).step(tokens[:, :1], model.new_cache(1))
    with model.record("logits"), pytest.raises(UserError, match="in a pass with targets"):
        model(tokens, targets=tokens)
    model(tokens, targets=tokens)
    assert torch.equal(copy.deepcopy(model)(tokens), model(tokens))


def test_closing_one_leaves_the_others_open(random_model):
    model, tokens = random_model(), torch.arange(6)[None]
    with model.record("blocks.0") as outer:
        with model.patch({"blocks.0.mlp": "zero"}):
            pass
        model(tokens)
    assert list(outer) == ["blocks.0"]


def test_the_mean_is_over_texts_and_positions_and_of_weights_over_texts(random_model):
    model, tokens = random_model(), torch.arange(18).reshape(3, 6)
    for name, dims in {"heads.1": (0, 1), "heads": (0, 2), "weights": (0,)}.items():
        path = f"blocks.1.attention.{name}"
        with model.record(path) as before:
            model(tokens)
        with model.patch({path: "mean"}), model.record(path) as after:
            model(tokens)
        known = before[path].mean(dim=dims, keepdim=True).expand_as(before[path])
        torch.testing.assert_close(after[path], known, rtol=0, atol=1e-6)
        assert (known - before[path]).abs().max() > 1e-3


def test_patterns_that_ask_for_tokens_have_them_in_a_cache_too(random_model):
    model, tokens = (
        random_model(attention="token(3) | window(2)"),
        torch.tensor([[3, 5, 6, 3, 8, 9, 10, 11]]),
    )
    whole = model.attention_weights(tokens)
    with torch.no_grad(), model.record("blocks.*.attention.weights") as seen:
        model(tokens, cache=model.new_cache(1, 16))
    for layer in range(2):
        torch.testing.assert_close(
            seen[f"blocks.{layer}.attention.weights"], whole[layer], rtol=0, atol=1e-5
        )


@pytest.mark.parametrize(
    "form",
    [*ATTENTION, {"attn_logit_softcap": 3.0}, {"attention_sinks": True}, {"positions": "alibi"}],
    ids=str,
)
def test_how_many_rows_are_weighed_at_a_time_changes_nothing(random_model, monkeypatch, form):
    letters = {"window": 8} if form == "LG" else {}
    model = random_model(**form if isinstance(form, dict) else {"attention": form, **letters})
    tokens = torch.arange(46).reshape(2, 23) * 5 % 61
    with torch.no_grad():
        known = model(tokens), model.attention_weights(tokens)  # more rows at a time than there are
        for module, rows in (
            (attention_dispatch, 1),
            (attention_dispatch, 2),
            (attention, 4),
        ):  # and eight times as many by SDPA
            monkeypatch.setattr(module, "ROWS", rows)
            torch.testing.assert_close(model(tokens), known[0], rtol=0, atol=1e-4)
            torch.testing.assert_close(model.attention_weights(tokens), known[1], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "patch", "found"),
    [
        ("blocks.0.mlp", lambda x: x[:1], r"\(1, 6, 32\); return a tensor of the same shape"),
        ("blocks.0.mlp", lambda x: x.mean(), r"\(\); return"),
        ("blocks.0.mlp", lambda x: x.__setitem__(0, 0.0), "None; return"),
        (
            "blocks.0.mlp",
            torch.ones(7),
            r"\(7,\); use a number, or a tensor that broadcasts to this shape",
        ),
        ("blocks.0.mlp", torch.ones(2, 2, 6, 32), r"\(2, 2, 6, 32\); use a number"),
        ("blocks.0.mlp", {}, "{}; use a number"),
        ("norm", lambda x: x[:1], r"\(1, 6, 32\); return"),
        ("norm", lambda x: x[..., :8], r"\(2, 6, 8\); return"),
    ],
)
def test_a_patch_of_another_shape_is_refused(random_model, name, patch, found):
    model, tokens = random_model(), torch.arange(12).reshape(2, 6)
    message = rf"^{name} has shape \(2, 6, 32\), but its patch is {found}"
    with torch.no_grad(), model.patch({name: patch}), pytest.raises(UserError, match=message):
        model(tokens)


def test_a_function_of_the_last_norm_may_choose_positions(random_model):
    model, tokens = random_model(), torch.arange(12).reshape(2, 6)
    with model.patch({"norm": lambda x: x[:, 2:4]}):
        close(model(tokens), random_model()(tokens)[:, 2:4])
