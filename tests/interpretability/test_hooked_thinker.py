"""The names and functions of TransformerLens: activations by formulas, experiments whose outcome is
known, and mistakes."""

import inspect

import lens_notebooks
import pytest
import torch
from chat_templates import bpe_tokenizer
from induction_model import V, induction_circuit

from thinker import save
from thinker.interpretability.hooked import HookedThinker, get_act_name
from thinker.model.inspection.open_hooks import has_open_hooks
from thinker.runtime.errors import UserError

pytestmark = pytest.mark.usefixtures("one_thread")
LAYERNORM = {"norm": "layernorm", "positions": "learned", "attention_bias": True}
FORMS = [{}, {"qk_norm": False, "tie_embeddings": True, "attn_logit_softcap": 2.0},
         {"attention": ["window(4)", "full"], "n_kv_heads": 1}, LAYERNORM, {"mlp": "ungated", "positions": "alibi"}]  # fmt: skip
T = 9


@pytest.fixture
def tokens():
    return torch.randint(0, 61, (2, T), generator=torch.Generator().manual_seed(2))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return bpe_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def worded(random_model, tokenizer):
    """A model that reads words."""
    return HookedThinker(random_model(vocab_size=tokenizer.vocab_size), tokenizer)


def close(ours, known):
    torch.testing.assert_close(ours, known, rtol=1e-4, atol=1e-4 * max(1, known.abs().max().item()))


@pytest.mark.parametrize("form", FORMS, ids=str)
@torch.no_grad()
def test_activations_fit_together(random_model, tokens, form):
    model = HookedThinker(random_model(**form))
    model.cfg.use_attn_result = model.cfg.use_hook_mlp_in = True
    logits, cache = model.run_with_cache(tokens)
    assert torch.equal(logits, model.model(tokens))
    resid = cache["embed"]
    if model.cfg.positional_embedding_type == "standard":
        resid = resid + cache["pos_embed"]
    for layer, block in enumerate(model.blocks):
        close(cache["resid_pre", layer], resid)
        for norm, name in (("ln1", "resid_pre"), ("ln2", "resid_mid")):
            x = cache[name, layer]
            if form == LAYERNORM:
                x = x - x.mean(-1, keepdim=True)
            scale = cache["scale", layer, norm]
            close(scale, (x.square().mean(-1, keepdim=True) + model.cfg.eps).sqrt())
            close(cache["normalized", layer, norm], x / scale)
        x = block.ln1(cache["resid_pre", layer])
        close(cache["q", layer], torch.einsum("btc,hcd->bthd", x, block.attn.W_Q) + block.attn.b_Q)
        close(
            cache["k", layer], torch.einsum("btc,hcd->bthd", x, block.attn._W_K) + block.attn._b_K
        )
        v = torch.einsum("btc,hcd->bthd", x, block.attn.W_V) + block.attn.b_V
        scores, pattern = cache["attn_scores", layer], cache["pattern", layer]
        if model.cfg.positional_embedding_type == "rotary":
            q, k = cache["rot_q", layer], cache["rot_k", layer]
            k = k.repeat_interleave(4 // k.shape[2], dim=2)
            known = torch.einsum("bthd,bshd->bhts", q, k) / model.cfg.d_head**0.5
            if "attn_logit_softcap" in form:
                known = 2 * torch.tanh(known / 2)
            distance = torch.arange(T)[:, None] - torch.arange(T)
            is_hidden = distance < 0
            if "attention" in form and layer == 0:
                is_hidden = is_hidden | (distance >= 4)
            close(scores.exp(), known.masked_fill(is_hidden, -torch.inf).exp())
        close(pattern, scores.softmax(-1))
        close(cache["z", layer], torch.einsum("bhts,bshd->bthd", pattern, v))
        close(
            cache["result", layer],
            torch.einsum("bthd,hdc->bthc", cache["z", layer], block.attn.W_O),
        )
        close(cache["attn_out", layer], cache["result", layer].sum(2) + block.attn.b_O)
        resid = resid + cache["attn_out", layer]
        close(cache["resid_mid", layer], resid)
        assert torch.equal(cache["mlp_in", layer], cache["resid_mid", layer])
        close(cache["mlp_out", layer], cache["post", layer] @ block.mlp.W_out + block.mlp.b_out)
        x = block.ln2(resid)
        if model.cfg.gated_mlp:
            close(cache["pre", layer], x @ block.mlp.W_gate)
            close(cache["pre_linear", layer], x @ block.mlp.W_in)
        else:
            close(cache["pre", layer], x @ block.mlp.W_in)
        resid = resid + cache["mlp_out", layer]
        close(cache["resid_post", layer], resid)
    close(model.unembed(model.ln_final(resid)), logits)
    close(cache["unembed.hook_in"] @ model.W_U + model.b_U, logits)


BLOCKS = [
    {"block": "both_norms", "norm": "rmsnorm_one_plus", "embedding_scale": 5.0, "rope_dim": 4},
    {"block": "post_norm", "qk_norm_type": "rmsnorm_width", "logit_softcap": 5.0},
    {"block": "parallel", "norm": "layernorm", "rope_dim": 4, "attention_bias": True, "attention_out_bias": True, "mlp_bias": True},
    {"block": "parallel_one_norm", "norm": "layernorm_no_bias", "logit_scale": 0.3, "head_bias": True},
    {"residual_scale": 0.4, "attention_out_bias": True, "mlp": "ungated", "mlp_bias": True, "norm": "layernorm_no_weight"},
    {"positions": "learned", "position_offset": 2, "attention_scale": 0.2, "qk_norm_type": "layernorm"},
]  # fmt: skip


@pytest.mark.parametrize("form", BLOCKS, ids=str)
@torch.no_grad()
def test_activations_of_other_blocks_fit_together(random_model, tokens, form):
    model = HookedThinker(random_model(**form))
    model.cfg.use_attn_result = model.cfg.use_hook_mlp_in = True
    logits, cache = model.run_with_cache(tokens)
    assert torch.equal(cache["embed"], model.W_E[tokens])
    if "position_offset" in form:
        assert torch.equal(cache["pos_embed"][0], model.W_pos[:T])
    has_norms_of_outputs = form.get("block") in ("post_norm", "both_norms")
    for layer, block in enumerate(model.blocks):
        resid = cache["resid_pre", layer] + cache["attn_out", layer]
        if model.cfg.parallel_attn_mlp:
            assert ("resid_mid", layer) not in cache
        else:
            close(cache["resid_mid", layer], resid)
        close(cache["resid_post", layer], resid + cache["mlp_out", layer])
        close(cache["pattern", layer], cache["attn_scores", layer].softmax(-1))
        attended = cache["result", layer].sum(2) + block.attn.b_O
        hidden = cache["post", layer] @ block.mlp.W_out + block.mlp.b_out
        if has_norms_of_outputs:
            norms = vars(block)
            attended = norms.get("ln1_post", block.ln1)(attended)
            hidden = norms.get("ln2_post", block.ln2)(hidden)
        close(attended, cache["attn_out", layer])
        close(hidden, cache["mlp_out", layer])
        x = cache["resid_pre", layer]
        if form.get("block") != "post_norm":
            x = block.ln1(x)
        close(cache["q", layer], torch.einsum("btc,hcd->bthd", x, block.attn.W_Q) + block.attn.b_Q)
    known = model.unembed(model.ln_final(resid + cache["mlp_out", layer]))
    close(known, model.ln_final(cache["resid_post", -1]) @ model.W_U + model.b_U)
    if "logit_softcap" in form:
        known = 5 * torch.tanh(known / 5)
    close(known, logits)

    def vary(value, hook):
        return value * (0.5 + torch.rand(value.shape, generator=torch.Generator().manual_seed(0)))

    def vary_in_place(value, hook):
        value.copy_(vary(value, hook))

    for name in model.hook_dict:
        # With a function that changes nothing, what follows is computed anew.
        same = model.run_with_hooks(tokens, fwd_hooks=[(name, lambda value, hook: value.clone())])
        close(same, logits)
        other = model.run_with_hooks(tokens, fwd_hooks=[(name, vary)])
        assert (other - logits).abs().max() > 1e-4, name
        written = model.run_with_hooks(tokens, fwd_hooks=[(name, vary_in_place)])
        assert torch.equal(written, other), name
    before = model.model(tokens).log_softmax(-1)
    model.process_weights_()
    close(model(tokens).log_softmax(-1), before)


@torch.no_grad()
def test_activations_in_half_precision_keep_their_type(random_model, tokens):
    form = {"attention_bias": True, "attention_out_bias": True, "mlp_bias": True, "head_bias": True}
    thinker = random_model(std=0.1, **form)
    thinker.activation_dtype = torch.bfloat16
    model = HookedThinker(thinker)
    logits, _ = model.run_with_cache(tokens)
    assert torch.equal(logits, thinker(tokens))
    for name in model.hook_dict:
        same = model.run_with_hooks(tokens, fwd_hooks=[(name, lambda value, hook: value.float())])
        assert same.dtype == torch.bfloat16, name
        assert (same.float() - logits.float()).abs().max() < 0.1, name


OURS = {"hook_attn_out": "attention", "hook_mlp_out": "mlp", "hook_resid_post": "", "attn.hook_pattern": "attention.weights",
        "attn.hook_z": "attention.heads", "attn.hook_rot_q": "attention.q", "attn.hook_rot_k": "attention.k",
        "attn.hook_attn_scores": "attention.scores", "mlp.hook_post": "mlp.hidden"}  # fmt: skip


@pytest.mark.parametrize("name", OURS)
@torch.no_grad()
def test_edits_are_those_of_patch(random_model, tokens, name):
    model = random_model()
    path = f"blocks.1.{OURS[name]}".rstrip(".")
    with model.patch({path: lambda x: 0.3 * x}):
        known = model(tokens)
    edited = HookedThinker(model).run_with_hooks(
        tokens, fwd_hooks=[(f"blocks.1.{name}", lambda x, hook: 0.3 * x)]
    )
    close(edited, known)
    assert not torch.equal(edited, model(tokens))


@torch.no_grad()
def test_a_head_is_zeroed_as_by_patch(random_model, tokens):
    model = random_model()

    def zero_head(z, hook):
        z[:, :, 2] = 0.0

    with model.patch({"blocks.0.attention.heads.2": "zero"}):
        known = model(tokens)
    for context in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with context():
            hooked = HookedThinker(model)
            close(
                hooked.run_with_hooks(tokens, fwd_hooks=[("blocks.0.attn.hook_z", zero_head)]),
                known,
            )


def test_hooks_come_and_go(random_model, tokens):
    model = HookedThinker(random_model())
    plain = model(tokens)
    seen = []

    def keep(value, hook):
        seen.append(hook.name)

    def fail(value, hook):
        raise ZeroDivisionError

    model.add_perma_hook("hook_embed", keep)
    model.add_hook("blocks.0.hook_resid_post", keep)
    model.add_hook(
        "blocks.0.hook_resid_post", lambda value, hook: seen.append("first"), prepend=True
    )
    with model.hooks(fwd_hooks=[("blocks.1.hook_mlp_out", fail)]), pytest.raises(ZeroDivisionError):
        model(tokens)
    assert seen == ["hook_embed", "first", "blocks.0.hook_resid_post"]
    assert not has_open_hooks(model.model)
    assert torch.equal(model.model(tokens), plain)  # the model itself has no hooks
    assert len(seen) == 3
    model.reset_hooks()
    assert torch.equal(model(tokens), plain)
    assert seen[3:] == ["hook_embed"]
    model.reset_hooks(including_permanent=True)
    model(tokens)
    assert len(seen) == 4
    model.run_with_hooks(tokens, fwd_hooks=[("hook_embed", keep)], reset_hooks_end=False)
    model(tokens)
    assert len(seen) == 6


def test_losses(random_model, tokens):
    model = HookedThinker(random_model())
    logits, loss = model(tokens, return_type="both")
    known = -logits[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
    close(loss, known.mean())
    close(model(tokens, return_type="loss", loss_per_token=True), known)
    total, count = model.model(tokens[:, :-1], targets=tokens[:, 1:])
    close(loss, total / count)
    assert model(tokens, return_type=None) is None
    assert torch.equal(model(tokens[0]), logits[:1])


@pytest.mark.parametrize(
    "form", [{}, LAYERNORM, {"attention_bias": True, "n_kv_heads": 1}], ids=str
)
@torch.no_grad()
def test_processed_weights_say_the_same(random_model, tokens, form):
    model = random_model(**form)
    known = model(tokens).log_softmax(-1)
    hooked = HookedThinker(model)
    hooked.process_weights_()
    close(hooked(tokens).log_softmax(-1), known)
    assert torch.equal(model(tokens).log_softmax(-1), known)
    assert hooked.W_U.mean(-1).abs().max() < 1e-6
    assert all((block.ln1.weight == 1).all() for block in hooked.blocks)
    assert not hooked.b_V.any()
    logits, cache = hooked.run_with_cache(tokens)
    parts = cache.logit_attrs(cache.decompose_resid(), 5).sum(0)
    biases = hooked.b_U[5]
    for layer, block in enumerate(hooked.blocks):  # which decompose_resid() has in attn_out
        assert block.attn.b_O.any() == ("attention_bias" in form), layer
    close(parts + biases, logits[..., 5])


# Notebooks


def test_the_induction_head_of_the_circuit_is_found():
    model = HookedThinker(induction_circuit())
    scores = lens_notebooks.induction_scores(
        model, torch.stack([torch.randperm(V) for _ in range(4)])
    )
    # The stripe begins at the last token of the first half, which has nothing to find.
    assert scores[1, 0] == pytest.approx(V / (V + 1), abs=1e-3)
    assert scores[0, 0] < 0.2


def single_words(model):
    """Words of the tokenizer's stories that are one token each."""
    words = [" boy", " girl", " the", " a", " was", " and", " it", " to", " of", " in"]
    found = [word for word in words if len(model.tokenizer.encode(word)) == 1]
    assert len(found) >= 4
    return found


@pytest.mark.parametrize("fold_ln", [True, False])
def test_attributions_sum_to_the_logit_difference(worded, tmp_path, fold_ln):
    save(worded.model, worded.tokenizer, tmp_path / "run")
    model = HookedThinker.from_pretrained(tmp_path / "run")
    first, second, third, fourth = single_words(model)[:4]
    prompts = [f"Once upon a time{first}{word} lived" for word in (second, third)]
    answers = [(first, second), (third, fourth)]
    if not fold_ln:
        model = HookedThinker.from_pretrained_no_processing(tmp_path / "run")
        with pytest.raises(AssertionError):  # as there: the weight of the norm is missing
            lens_notebooks.direct_logit_attribution(model, prompts, answers)
        return
    total, results, labels = lens_notebooks.direct_logit_attribution(model, prompts, answers)
    known = []
    for prompt, pair in zip(prompts, answers):
        ids = [model.tokenizer.bos_id, *model.tokenizer.encode(prompt)]
        right, wrong = (model.tokenizer.encode(answer)[0] for answer in pair)
        logits = worded.model(torch.tensor([ids]))[0, -1]
        known.append(logits[right] - logits[wrong])
    close(total, torch.stack(known).mean())
    close(results["lens"][-1], total)
    close(results["layers"].sum(0), total)
    assert labels == ["0_pre", "0_mid", "1_pre", "1_mid", "final_post", "embed", "0_attn_out", "0_mlp_out", "1_attn_out",
                      "1_mlp_out", *(f"L{layer}H{head}" for layer in range(2) for head in range(4))]  # fmt: skip
    attention = results["layers"][[1, 3]].sum()
    close(results["heads"].sum(), attention)


def test_patching_restores_the_answer_where_prompts_differ(worded):
    first, second = single_words(worded)[:2]
    clean, corrupted = (f"Once upon a time{word} lived here" for word in (first, second))
    restored = lens_notebooks.activation_patching(worded, clean, corrupted, (first, second))
    differs = worded.to_tokens(clean)[0] != worded.to_tokens(corrupted)[0]
    close(restored[0], differs.float())
    position = differs.nonzero().item()
    assert not restored[:, :position].any()
    attended = lens_notebooks.activation_patching(
        worded, clean, corrupted, (first, second), "attn_out"
    )
    assert not attended[:, :position].any()
    assert attended[:, position:].abs().min() > 0 or attended[:, -1].abs().min() > 0


# Tokens


def test_tokens_and_texts(worded):
    tokenizer = worded.tokenizer
    ids = tokenizer.encode("Once upon a time")
    bos, eos = tokenizer.bos_id, tokenizer.eos_id
    assert worded.to_tokens("Once upon a time").tolist() == [[bos, *ids]]
    assert worded.to_tokens("Once upon a time", prepend_bos=False).tolist() == [ids]
    assert HookedThinker(worded.model, tokenizer, default_prepend_bos=False).to_tokens(
        "Once upon a time"
    ).tolist() == [ids]
    two = worded.to_tokens(["Once upon a time", ""])
    assert two.tolist() == [[bos, *ids], [bos] + [eos] * len(ids)]
    assert worded.to_string(two) == ["<s>Once upon a time", "<s>" + "</s>" * len(ids)]
    assert worded.to_string(two[0]) == worded.to_string([bos, *ids]) == "<s>Once upon a time"
    assert "".join(worded.to_str_tokens("Once upon a time")) == "<s>Once upon a time"
    assert worded.to_str_tokens(two[:1]) == ["<s>", *(tokenizer.decode([i]) for i in ids)]
    assert worded.to_tokens("<s></s>", prepend_bos=False).tolist() == [[bos, eos]]
    assert worded.to_str_tokens("é", prepend_bos=False) in (["é"], ["\ufffd", "\ufffd"])
    long = worded.to_tokens("a b " * 100)
    assert long.shape == (1, worded.cfg.n_ctx)
    assert worded.to_tokens("a b " * 100, truncate=False).shape[1] > worded.cfg.n_ctx
    word = single_words(worded)[0]
    number = worded.to_single_token(word)
    assert worded.to_single_str_token(number) == word
    text = f"x{word} y{word}"
    positions = [i for i, each in enumerate(worded.to_str_tokens(text)) if each == word]
    assert worded.get_token_position(word, text) == positions[0]
    assert worded.get_token_position(number, text, mode="last") == positions[1]
    close(worded.tokens_to_residual_directions(word), worded.W_U[:, number])
    assert worded.tokens_to_residual_directions(two).shape == (*two.shape, 32)


def test_generated_texts(worded):
    text = worded.generate(
        "Once upon", max_new_tokens=8, do_sample=False, stop_at_eos=False, verbose=False
    )
    ids = worded.to_tokens("Once upon")
    for _ in range(8):
        ids = torch.cat([ids, worded.model(ids)[:, -1:].argmax(-1)], dim=1)
    assert text == worded.tokenizer.decode(ids[0].tolist())
    start = worded.to_tokens("Once upon")
    same = worded.generate(start, 8, temperature=0.0, stop_at_eos=False, verbose=False)
    assert torch.equal(same, ids)
    torch.manual_seed(1)
    first = worded.generate(start, 8, top_k=5, verbose=False)
    torch.manual_seed(1)
    assert torch.equal(worded.generate(start, 8, top_k=5, verbose=False), first)

    def steer(resid, hook):
        return resid + 30 * worded.W_U[:, 7]

    with worded.hooks(fwd_hooks=[("blocks.1.hook_resid_post", steer)]):
        steered = worded.generate(start, 4, temperature=0.0, stop_at_eos=False, verbose=False)
    assert not torch.equal(steered[:, : ids.shape[1]], ids[:, : steered.shape[1]])
    end = ids[0, start.shape[1]].item()
    stopped = worded.generate(start, 8, temperature=0.0, eos_token_id=end, verbose=False)
    assert torch.equal(stopped, ids[:, : start.shape[1] + 1])


# Mistakes


def expect(message, function, *arguments, **options):
    with pytest.raises(UserError, match=message):
        function(*arguments, **options)


def test_mistakes_are_explained(worded, random_model, tokens, tokenizer):
    near = r"no activation blocks.0.attn.hook_patern; did you mean blocks.0.attn.hook_pattern"
    expect(near, worded.run_with_cache, tokens, names_filter="blocks.0.attn.hook_patern")
    expect(near, worded.run_with_hooks, tokens, fwd_hooks=[("blocks.0.attn.hook_patern", print)])
    expect(near, worded.add_hook, "blocks.0.attn.hook_patern", print)
    expect("no activation blocks.0.hook_q_input", worded.add_hook, "blocks.0.hook_q_input", print)
    expect("selects no activation", worded.add_hook, lambda name: name.startswith("block0"), print)
    linear = HookedThinker(random_model(attention="linear(8)"))
    expect(
        "no activation blocks.0.attn.hook_attn_scores",
        linear.add_hook,
        "blocks.0.attn.hook_attn_scores",
        print,
    )
    _, cache = worded.run_with_cache(
        tokens, names_filter=["blocks.1.attn.hook_pattern", "hook_embed"]
    )
    assert list(cache) == ["hook_embed", "blocks.1.attn.hook_pattern"]
    assert ("pattern", 1) in cache
    assert ("pattern", 0) not in cache
    expect("was not cached; include it in names_filter", lambda: cache["pattern", 0])
    expect(
        "the cache has no blocks.1.attn.hook_patern|no blocks.1.hook_patern",
        lambda: cache["patern", 1],
    )
    expect("must return a tensor of shape", worded.run_with_hooks, tokens,
           fwd_hooks=[("hook_embed", lambda x, hook: x[:1])])  # fmt: skip
    with torch.no_grad(), worded.hooks(bwd_hooks=[("hook_embed", print)]):
        expect("turn gradients on", worded, tokens)
    expect("use logits, loss, both or None", worded, tokens, return_type="logit")
    expect("use fwd or bwd", worded.add_hook, "hook_embed", print, dir="forward")
    expect("texts of different lengths", worded, ["Once upon a time", "a"], return_type="loss")
    expect("is 2 tokens, not one|is [3-9] tokens, not one", worded.to_single_token, "zqx")
    expect("do not contain", worded.get_token_position, single_words(worded)[0], "zqx")
    expect("more than n_ctx", worded.generate, "a", max_new_tokens=100)
    expect("has no learned positions", lambda: worded.W_pos)
    expect("pass a Thinker", HookedThinker, "runs/x")
    expect("no tokenizer", HookedThinker(worded.model).to_tokens, "a")
    expect("only for one text", worded.run_with_cache, tokens, remove_batch_dim=True)
    expect("loss_per_token needs", worded, tokens, loss_per_token=True)
    dropping = random_model(dropout=0.1).train()
    expect(r"model.eval\(\)", HookedThinker(dropping), tokens)
    with pytest.raises(AttributeError, match="no run_with_cach; did you mean run_with_cache"):
        _ = worded.run_with_cach
    with pytest.raises(TypeError, match="past_kv_cache"):
        worded(tokens, past_kv_cache=None)


def test_one_text_without_its_batch(random_model, tokens):
    model = HookedThinker(random_model())
    _, cache = model.run_with_cache(tokens[:1])
    _, removed = model.run_with_cache(tokens[:1], remove_batch_dim=True)
    assert removed["pattern", 1].shape == (4, T, T)
    for name, value in cache.remove_batch_dim().items():
        assert torch.equal(value, removed[name])
    close(removed.accumulated_resid(apply_ln=True)[-1] @ model.W_U, model(tokens[:1])[0])
    heads, labels = removed.stack_head_results(return_labels=True, incl_remainder=True)
    close(heads.sum(0), removed["resid_post", -1])
    assert labels[-1] == "remainder"
    _, plain = model.run_with_cache(tokens, return_cache_object=False, device="cpu")
    assert isinstance(plain, dict)


def test_notebooks_are_written_for_both():
    source = inspect.getsource(lens_notebooks)
    assert "thinker" not in source.split('"""', 2)[2]
    assert get_act_name("pattern", 3) == "blocks.3.attn.hook_pattern"
