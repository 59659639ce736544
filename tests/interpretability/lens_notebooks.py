"""Three experiments that many notebooks on TransformerLens contain, as they are written there.

`model` is a HookedTransformer, or a HookedThinker.
"""

from functools import partial

import torch


def induction_scores(model, tokens):
    """Mean attention from each token of the second half to the one after its first occurrence,
    (layers, heads), for tokens (B, n) that are repeated."""
    seq_len = tokens.shape[1]
    repeated_tokens = torch.cat([tokens, tokens], dim=1).to(model.cfg.device)
    _, cache = model.run_with_cache(repeated_tokens)
    scores = torch.zeros(model.cfg.n_layers, model.cfg.n_heads)
    for layer in range(model.cfg.n_layers):
        stripe = cache["pattern", layer].diagonal(dim1=-2, dim2=-1, offset=1 - seq_len)
        scores[layer] = stripe.mean(dim=(0, -1))

    # The same with hooks, which store no activations.
    score_store = torch.zeros(model.cfg.n_layers, model.cfg.n_heads, device=model.cfg.device)

    def induction_score_hook(pattern, hook):
        induction_stripe = pattern.diagonal(dim1=-2, dim2=-1, offset=1 - seq_len)
        score_store[hook.layer(), :] = induction_stripe.mean(dim=(0, -1))

    model.run_with_hooks(
        repeated_tokens,
        return_type=None,
        fwd_hooks=[(lambda name: name.endswith("pattern"), induction_score_hook)],
    )
    torch.testing.assert_close(scores, score_store.cpu())
    return scores


def direct_logit_attribution(model, prompts, answers):
    """The logit difference of pairs of answers after each sublayer, and what each sublayer and head
    adds to it, with their labels."""
    tokens = model.to_tokens(prompts, prepend_bos=True)
    answer_tokens = torch.tensor(
        [[model.to_single_token(answer) for answer in pair] for pair in answers],
        device=model.cfg.device,
    )
    original_logits, cache = model.run_with_cache(tokens)
    final_logits = original_logits[:, -1, :]
    answer_logits = final_logits.gather(dim=-1, index=answer_tokens)
    original_average_logit_diff = (answer_logits[:, 0] - answer_logits[:, 1]).mean()

    answer_residual_directions = model.tokens_to_residual_directions(answer_tokens)
    logit_diff_directions = answer_residual_directions[:, 0] - answer_residual_directions[:, 1]

    def residual_stack_to_logit_diff(residual_stack, cache):
        scaled_residual_stack = cache.apply_ln_to_stack(residual_stack, layer=-1, pos_slice=-1)
        return (scaled_residual_stack * logit_diff_directions).sum(-1).mean(-1)

    final_token_residual_stream = cache["resid_post", -1][:, -1, :]
    average_logit_diff = residual_stack_to_logit_diff(final_token_residual_stream[None], cache)[0]
    torch.testing.assert_close(
        average_logit_diff, original_average_logit_diff, rtol=1e-4, atol=1e-4
    )

    results = {}
    results["lens"], lens_labels = cache.accumulated_resid(
        layer=-1, incl_mid=True, pos_slice=-1, return_labels=True
    )
    results["layers"], layer_labels = cache.decompose_resid(
        layer=-1, pos_slice=-1, return_labels=True
    )
    results["heads"], head_labels = cache.stack_head_results(
        layer=-1, pos_slice=-1, return_labels=True
    )
    for name, stack in results.items():
        results[name] = residual_stack_to_logit_diff(stack, cache)
    return original_average_logit_diff, results, [*lens_labels, *layer_labels, *head_labels]


def activation_patching(model, clean_prompt, corrupted_prompt, answers, name="resid_pre"):
    """How much of the logit difference of the clean prompt an activation of it restores in the
    corrupted one, (layers, positions): 0 nothing, 1 all."""
    clean_tokens = model.to_tokens(clean_prompt)
    corrupted_tokens = model.to_tokens(corrupted_prompt)
    correct, incorrect = (model.to_single_token(answer) for answer in answers)

    def logits_to_logit_diff(logits):
        return (logits[0, -1, correct] - logits[0, -1, incorrect]).item()

    clean_logits, clean_cache = model.run_with_cache(clean_tokens)
    clean_logit_diff = logits_to_logit_diff(clean_logits)
    corrupted_logit_diff = logits_to_logit_diff(model(corrupted_tokens))

    def patch_residual_component(corrupted_residual_component, hook, pos, clean_cache):
        corrupted_residual_component[:, pos, :] = clean_cache[hook.name][:, pos, :]
        return corrupted_residual_component

    n_positions = clean_tokens.shape[1]
    patched = torch.zeros(model.cfg.n_layers, n_positions)
    for layer in range(model.cfg.n_layers):
        for position in range(n_positions):
            hook_fn = partial(patch_residual_component, pos=position, clean_cache=clean_cache)
            patched_logits = model.run_with_hooks(
                corrupted_tokens, fwd_hooks=[(f"blocks.{layer}.hook_{name}", hook_fn)]
            )
            difference = logits_to_logit_diff(patched_logits) - corrupted_logit_diff
            patched[layer, position] = difference / (clean_logit_diff - corrupted_logit_diff)
    return patched
