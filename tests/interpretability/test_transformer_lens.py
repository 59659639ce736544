"""HookedThinker beside TransformerLens's own HookedTransformer with the same random weights."""

from functools import partial
from importlib.metadata import version

import lens_notebooks
import pytest
import torch
from chat_templates import TOKENIZERS

from thinker.interpretability.hooked import HookedThinker, get_act_name

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*HookedTransformer is deprecated"),
]
lens = pytest.importorskip("transformer_lens", reason="pip install 'transformer_lens>=3.9,<4'")
einops = pytest.importorskip("einops")
if int(version("transformer_lens").split(".")[0]) > 3:
    pytest.skip("version 4 has no HookedTransformer", allow_module_level=True)

GPT2 = {"norm": "layernorm", "positions": "learned", "mlp": "ungated", "activation": "gelu",
        "attention_bias": True, "qk_norm": False, "n_kv_heads": 4, "norm_eps": 1e-5}  # fmt: skip
FORMS = {
    "llama": {"qk_norm": False},
    "qwen3": {"tie_embeddings": True},
    "qwen2": {"qk_norm": False, "attention_bias": True, "n_kv_heads": 1},
    "wide heads": {"head_dim": 12, "n_kv_heads": 4, "rope_theta": 500.0},
    "softcap": {"attn_logit_softcap": 2.0, "n_layers": 3},
    "windows": {"attention": ["window(4)", "full"], "qk_norm": False},
    "gpt2": GPT2,
}
T = 11


@pytest.fixture(scope="module")
def tokens():
    return torch.randint(0, 61, (2, T), generator=torch.Generator().manual_seed(3))


def transformer(model, process=False, tokenizer=None):
    """A HookedTransformer with the weights of a Thinker."""
    ours = model.config
    is_gpt2 = ours.norm == "layernorm"
    options = {}
    if not is_gpt2:
        options = {"rotary_dim": ours.head_dim, "rotary_base": ours.rope_theta, "final_rms": True}
    if "window(4)" in ours.attention:
        options |= {"use_local_attn": True, "window_size": 4, "attn_types": ["local", "global"]}
    if ours.attn_logit_softcap is not None:
        options["attn_scores_soft_cap"] = ours.attn_logit_softcap
    if ours.n_kv_heads != ours.n_heads:
        options["n_key_value_heads"] = ours.n_kv_heads
    config = lens.HookedTransformerConfig(
        n_layers=ours.n_layers, d_model=ours.d_model, n_ctx=ours.max_seq_len, d_head=ours.head_dim,
        n_heads=ours.n_heads, d_vocab=ours.vocab_size, d_mlp=ours.d_ff, eps=ours.norm_eps,
        act_fn="gelu" if is_gpt2 else "silu", gated_mlp=not is_gpt2,
        normalization_type="LN" if is_gpt2 else "RMS",
        positional_embedding_type="standard" if is_gpt2 else "rotary",
        use_qk_norm=ours.qk_norm, device="cpu", **options,
    )  # fmt: skip
    weights = {key: value.detach() for key, value in state_of(model).items()}
    theirs = lens.HookedTransformer(config, tokenizer)
    if process:
        theirs.load_and_process_state_dict(weights, fold_value_biases=True)
    else:
        missing, unexpected = theirs.load_state_dict(weights, strict=False)
        assert not unexpected
        assert all(
            name.endswith(("mask", "IGNORE", "rotary_sin", "rotary_cos")) for name in missing
        )
    return theirs.eval()


def state_of(model):
    """The weights of a Thinker as TransformerLens stores them."""
    config, state = model.config, {}
    state["embed.W_E"] = model.embedding.weight
    if model.positions is not None:
        state["pos_embed.W_pos"] = model.positions.weight
    for layer, block in enumerate(model.blocks):
        path, attention, mlp = f"blocks.{layer}.", block.attention, block.mlp
        is_grouped = config.n_kv_heads != config.n_heads
        for letter, linear in zip("QKV", (attention.q_proj, attention.k_proj, attention.v_proj)):
            name = f"_W_{letter}" if is_grouped and letter != "Q" else f"W_{letter}"
            state[f"{path}attn.{name}"] = einops.rearrange(
                linear.weight, "(h d) c -> h c d", d=config.head_dim
            )
            bias = torch.zeros(len(linear.weight)) if linear.bias is None else linear.bias
            state[f"{path}attn.{name.replace('W', 'b')}"] = einops.rearrange(
                bias, "(h d) -> h d", d=config.head_dim
            )
        state[f"{path}attn.W_O"] = einops.rearrange(
            attention.o_proj.weight, "c (h d) -> h d c", d=config.head_dim
        )
        state[f"{path}attn.b_O"] = torch.zeros(config.d_model)
        if config.qk_norm:
            state[f"{path}attn.q_norm.w"] = attention.q_norm.weight
            state[f"{path}attn.k_norm.w"] = attention.k_norm.weight
        for name, norm in (("ln1", block.attention_norm), ("ln2", block.mlp_norm)):
            state |= norm_state(path + name, norm)
        if hasattr(mlp, "gate_proj"):
            state[f"{path}mlp.W_gate"] = mlp.gate_proj.weight.T
        state[f"{path}mlp.W_in"] = mlp.up_proj.weight.T
        state[f"{path}mlp.W_out"] = mlp.down_proj.weight.T
        state[f"{path}mlp.b_in"] = torch.zeros(config.d_ff)
        state[f"{path}mlp.b_out"] = torch.zeros(config.d_model)
    state |= norm_state("ln_final", model.norm)
    state["unembed.W_U"] = model.lm_head.weight.T
    state["unembed.b_U"] = torch.zeros(config.vocab_size)
    return state


def norm_state(path, norm):
    state = {f"{path}.w": norm.weight}
    if getattr(norm, "bias", None) is not None:
        state[f"{path}.b"] = norm.bias
    return state


@pytest.fixture(params=FORMS, scope="module")
def pair(request, random_model):
    """The same model in ours and in theirs."""
    model = random_model(**FORMS[request.param])
    pair = HookedThinker(model), transformer(model)
    pair[0].cfg.use_attn_result = pair[0].cfg.use_hook_mlp_in = True
    pair[1].set_use_attn_result(True)
    pair[1].set_use_hook_mlp_in(True)
    return pair


def close(ours, theirs, name=""):
    """Equal to 1e-5 of the largest finite number, and infinite at the same places."""
    assert ours.shape == theirs.shape, name
    assert torch.equal(ours.isinf(), theirs.isinf()), name
    ours, theirs = ours.nan_to_num(neginf=0), theirs.nan_to_num(neginf=0)
    error = (ours - theirs).abs().max() / theirs.abs().max().clamp_min(1e-6)
    assert error <= 1e-5, (name, error.item())


def test_every_activation_is_theirs(pair, tokens):
    ours, theirs = pair
    known_logits, known = theirs.run_with_cache(tokens)
    logits, cache = ours.run_with_cache(tokens)
    close(logits, known_logits)
    assert set(cache.keys()) == set(known.keys())
    assert list(cache.keys()) == [name for name in ours.hook_dict if name in known]
    for name, value in known.items():
        close(cache[name], value, name)


def test_gradients_are_theirs(pair, tokens):
    sums = []
    for model in pair:
        total = {}

        def add(gradient, hook):
            # Theirs calls ln1 for queries, keys and values, and each has its own gradient.
            total[hook.name] = total.get(hook.name, 0) + gradient.detach()  # noqa: B023

        with model.hooks(bwd_hooks=[(lambda name: True, add)]):
            model(tokens, return_type="loss").backward()
        model.zero_grad()
        sums.append(total)
    ours, theirs = sums
    assert set(ours) == set(theirs) == set(pair[0].hook_dict)
    for name, value in theirs.items():
        close(ours[name], value, name)


def test_gradients_in_the_cache_are_theirs(pair, tokens):
    ours, theirs = pair
    options = {"return_type": "loss", "incl_bwd": True}
    names = [
        "blocks.0.attn.hook_pattern",
        "blocks.0.hook_resid_mid",
        "blocks.1.attn.hook_z",
        "hook_embed",
    ]
    known_loss, known = theirs.run_with_cache(tokens, names_filter=names, **options)
    loss, cache = ours.run_with_cache(tokens, names_filter=names, **options)
    close(loss, known_loss)
    assert set(cache) == set(known) == {*names, *(f"{name}_grad" for name in names)}
    for name, value in known.items():
        close(cache[name], value, name)


def test_changed_gradients_change_those_before(pair, tokens):
    if pair[0].model.config.tie_embeddings:
        pytest.skip("the embedding of theirs has a gradient of its own")

    def double(gradient, hook):
        return (2 * gradient,)

    gradients = []
    for model in pair:
        with model.hooks(
            bwd_hooks=[("blocks.1.hook_resid_pre", double), ("blocks.0.attn.hook_pattern", double)]
        ):
            model(tokens, return_type="loss").backward()
        gradients.append(model.W_E.grad.clone())
        model.zero_grad()
    close(*gradients)


@torch.no_grad()
def test_edits_of_every_activation_have_their_effect(pair, tokens):
    ours, theirs = pair
    plain = theirs(tokens)

    def scale_one(value, hook):
        factor = torch.ones_like(value)
        factor[..., -1] = 1.7
        if "scores" in hook.name:
            factor[:] = 0.6
        return value * factor

    def write_into(value, hook):
        value *= 0.8

    def zero_half(value, hook):
        value[:, :, value.shape[2] // 2 :] = 0.0
        return value

    for name in ours.hook_dict:
        edits = [scale_one, write_into]
        if name.endswith(("hook_q", "hook_k", "hook_v", "hook_z", "resid_pre", "mlp_out")):
            edits.append(zero_half)
        for edit in edits:
            known = theirs.run_with_hooks(tokens, fwd_hooks=[(name, edit)])
            assert not torch.equal(known, plain), name
            close(ours.run_with_hooks(tokens, fwd_hooks=[(name, edit)]), known, name)
    assert torch.equal(ours(tokens), ours.model(tokens))


@torch.no_grad()
def test_several_hooks_and_the_cache_within_are_theirs(pair, tokens):
    results = []
    for model in pair:
        seen = []

        def zero(value, hook):
            seen.append((hook.name, hook.layer()))  # noqa: B023
            return torch.zeros_like(value)

        def add_to_it(value, hook):
            hook.ctx["sum"] = value.sum().item()
            value[:, -1] += 1.0

        def is_of_layer_one(name):
            return name.startswith("blocks.1.") and name.endswith("hook_z")

        model.add_hook("blocks.0.hook_resid_mid", add_to_it)
        with model.hooks(fwd_hooks=[(is_of_layer_one, zero), ("blocks.0.hook_mlp_out", add_to_it)]):
            logits, cache = model.run_with_cache(tokens)
        loss = model(tokens, return_type="loss", loss_per_token=True)
        model.reset_hooks()
        results.append((logits, cache, loss, seen, model(tokens)))
    (
        (logits, cache, loss, seen, after),
        (known, known_cache, known_loss, known_seen, known_after),
    ) = results
    close(logits, known)
    close(loss, known_loss)
    close(after, known_after)
    assert seen == known_seen
    for name, value in known_cache.items():
        close(cache[name], value, name)


@torch.no_grad()
def test_sums_of_the_residual_stream_are_theirs(pair, tokens):
    ours, theirs = pair
    _, cache = ours.run_with_cache(tokens)
    _, known = theirs.run_with_cache(tokens)
    n_layers = ours.cfg.n_layers
    calls = []
    for pos_slice in (None, -1, (2, 5), [1, 3]):
        for layer in (None, -1, 1, n_layers):
            for apply_ln in (False, True):
                options = {"layer": layer, "apply_ln": apply_ln, "pos_slice": pos_slice}
                calls += [
                    ("accumulated_resid", options | {"incl_mid": True}),
                    ("accumulated_resid", options),
                ]
                calls += [
                    ("decompose_resid", options | {"mode": mode}) for mode in ("all", "attn", "mlp")
                ]
                calls += [
                    ("stack_head_results", options),
                    ("stack_head_results", options | {"incl_remainder": True}),
                ]
    calls += [
        (name, {"layer": 1, "mlp_input": True, "apply_ln": True})
        for name in ("accumulated_resid", "decompose_resid")
    ]
    calls += [("decompose_resid", {"incl_embeds": False})]
    for name, options in calls:
        stack, labels = getattr(cache, name)(return_labels=True, **options)
        known_stack, known_labels = getattr(known, name)(return_labels=True, **options)
        assert labels == known_labels, (name, options)
        close(stack, known_stack, (name, options))
    stack = known.decompose_resid()
    for target, other in (
        (3, None),
        (3, 7),
        (torch.tensor([[5] * T, [6] * T]), None),
        (tokens, tokens.flip(1)),
    ):
        close(cache.logit_attrs(stack, target, other), known.logit_attrs(stack, target, other))
    last = known.decompose_resid(pos_slice=-1)
    answers = torch.tensor([4, 9]), torch.tensor([9, 4])
    close(
        cache.logit_attrs(last, *answers, pos_slice=-1),
        known.logit_attrs(last, *answers, pos_slice=-1),
    )
    close(cache.stack_activation("pattern"), known.stack_activation("pattern"))
    close(
        cache.stack_activation("scale", sublayer_type="ln2"),
        known.stack_activation("scale", sublayer_type="ln2"),
    )


def names_of_weights(theirs):
    names = [
        "W_E",
        "W_U",
        "b_U",
        "W_Q",
        "W_K",
        "W_V",
        "W_O",
        "b_Q",
        "b_K",
        "b_V",
        "b_O",
        "W_in",
        "W_out",
        "b_in",
        "b_out",
    ]
    if theirs.cfg.gated_mlp:
        names.append("W_gate")
    if theirs.cfg.positional_embedding_type == "standard":
        names.append("W_pos")
    return names


def test_weights_are_theirs(pair):
    ours, theirs = pair
    for name in names_of_weights(theirs):
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
    block, known = ours.blocks[1], theirs.blocks[1]
    assert torch.equal(block.attn.W_K, known.attn.W_K)
    assert torch.equal(block.mlp.W_in, known.mlp.W_in)
    for name in ("n_layers", "n_heads", "n_key_value_heads", "d_model", "d_head", "d_mlp", "d_vocab", "d_vocab_out", "n_ctx", "eps",
                 "act_fn", "gated_mlp", "normalization_type", "positional_embedding_type", "use_qk_norm", "attn_only"):  # fmt: skip
        assert getattr(ours.cfg, name) == getattr(theirs.cfg, name), name


@pytest.mark.parametrize("form", FORMS)
@torch.no_grad()
def test_processed_weights_are_theirs(random_model, tokens, form):
    model = random_model(**FORMS[form])
    ours, theirs = HookedThinker(model), transformer(model, process=True)
    before = model(tokens)
    ours.process_weights_()
    assert torch.equal(model(tokens), before)
    assert ours.cfg.normalization_type == theirs.cfg.normalization_type
    for name in names_of_weights(theirs):
        close(getattr(ours, name), getattr(theirs, name), name)
    logits, cache = ours.run_with_cache(tokens)
    known_logits, known = theirs.run_with_cache(tokens)
    close(logits, known_logits)
    close(logits.log_softmax(-1), before.log_softmax(-1))
    assert set(cache.keys()) == set(known.keys())
    for name, value in known.items():
        close(cache[name], value, name)
    attributions = cache.logit_attrs(cache.decompose_resid(), tokens)
    close(attributions, known.logit_attrs(known.decompose_resid(), tokens))


def test_short_names_are_theirs():
    from transformer_lens.utilities import get_act_name as known

    words = ["k", "v", "q", "z", "rot_k", "rot_q", "result", "pattern", "attn_scores", "pre", "post", "mid", "pre_linear", "attn",
             "attn_logits", "key", "query", "value", "mlp_pre", "mlp_mid", "mlp_post", "scale", "normalized", "embed", "pos_embed",
             "resid_pre", "resid_post", "attn_out", "hook_embed", "blocks.0.attn.hook_q"]  # fmt: skip
    for name in words:
        for arguments in (
            (),
            (6,),
            (6, "ln2"),
            (6, "a"),
            (None, "ln_final"),
            (0, "block"),
            (12, "mlp"),
        ):
            assert get_act_name(name, *arguments) == known(name, *arguments), (name, arguments)
    for name in ("k6", "scale4ln1", "pre5", "attn12", "resid_pre3", "normalized27ln2", "embed"):
        assert get_act_name(name) == known(name), name


@pytest.fixture(params=["imported-bpe", "prepend", "metaspace"], scope="module")
def worded_pair(request, random_model, tmp_path_factory):
    """The same model in ours and in theirs with a tokenizer, and its processed weights."""
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer = TOKENIZERS[request.param](folder)
    model = random_model(vocab_size=tokenizer.vocab_size)
    ours = HookedThinker(model, tokenizer)
    ours.process_weights_()
    theirs = PreTrainedTokenizerFast.from_pretrained(folder, padding_side="right")
    assert theirs.bos_token == tokenizer.bos_token
    return ours, transformer(model, process=True, tokenizer=theirs)


def begins_with_space(model):
    return "".join(model.to_str_tokens("a", prepend_bos=False)) != "a"


@torch.no_grad()
def test_notebooks_have_their_results(worded_pair):
    tokens = torch.randint(10, 100, (4, 12), generator=torch.Generator().manual_seed(5))
    close(*(lens_notebooks.induction_scores(model, tokens) for model in worded_pair))
    if begins_with_space(worded_pair[0]):
        return  # it has no word that is one token
    prompts = [
        "When b and a went to the shop, b gave it to",
        "When c and a went to the shop, c gave it to",
    ]
    answers = [("a", "b"), ("a", "c")]
    ours, theirs = (
        lens_notebooks.direct_logit_attribution(model, prompts, answers) for model in worded_pair
    )
    close(ours[0], theirs[0])
    for name, values in theirs[1].items():
        close(ours[1][name], values, name)
    assert ours[2] == theirs[2]
    for name in ("resid_pre", "resid_mid", "attn_out", "mlp_out"):
        run = partial(
            lens_notebooks.activation_patching,
            clean_prompt=prompts[0],
            corrupted_prompt=prompts[1],
            answers=("b", "c"),
            name=name,
        )
        close(run(worded_pair[0]), run(worded_pair[1]), name)


@torch.no_grad()
def test_their_patching_functions_take_it(pair, tokens):
    from transformer_lens import patching

    def metric(logits):
        return logits[0, -1, 3] - logits[0, -1, 7]

    residuals = ["resid_pre", "attn_out", "mlp_out"]
    heads = ["attn_head_out_all_pos", "attn_head_pattern_all_pos", "attn_head_q_by_pos"]
    for name in residuals + heads:
        patch = getattr(patching, f"get_act_patch_{name}")
        results = []
        for model in pair:
            _, cache = model.run_with_cache(tokens[:1])
            results.append(patch(model, tokens[1:], cache, metric))
        close(*results, name)


def test_texts_and_tokens_are_theirs(worded_pair):
    ours, theirs = worded_pair
    for text in ("Once upon a time", "", " a", "a\n\nb  c", "<s>x</s>", "é 中", "Yes, the boy: a!"):
        for prepend_bos in (True, False):
            if not text and not prepend_bos:
                continue  # theirs has no tokens of which to make a tensor
            tokens = ours.to_tokens(text, prepend_bos=prepend_bos)
            assert torch.equal(tokens, theirs.to_tokens(text, prepend_bos=prepend_bos)), text
            # Theirs keeps the space that SentencePiece wrote behind BOS.
            if not (begins_with_space(ours) and tokens[0, 0] == ours.tokenizer.bos_id):
                assert ours.to_string(tokens[0]) == theirs.to_string(tokens[0])
                assert ours.to_string(tokens) == theirs.to_string(tokens)
        assert torch.equal(ours.to_tokens(text), theirs.to_tokens(text))
    texts = ["Once upon a time", "a"]
    assert torch.equal(ours.to_tokens(texts), theirs.to_tokens(texts))
    text = "Once upon a time "
    long = text * 30
    assert torch.equal(ours.to_tokens(long), theirs.to_tokens(long))
    for number in range(10, ours.cfg.d_vocab, 37):
        try:
            word = theirs.to_single_str_token(number)
            known = theirs.to_single_token(word)
        except AssertionError:
            continue
        assert ours.to_single_token(word) == known


@torch.no_grad()
def test_greedy_texts_are_theirs(worded_pair):
    options = {"max_new_tokens": 12, "do_sample": False, "verbose": False}
    texts = [model.generate("Once upon", **options) for model in worded_pair]
    assert texts[0] == texts[1]
    row = worded_pair[0].to_tokens("Once upon a time")[0]
    tokens = torch.stack([row, torch.cat([row[:1], row[1:].flip(0)])])
    ours, theirs = (model.generate(tokens, **options) for model in worded_pair)
    assert torch.equal(ours, theirs)
