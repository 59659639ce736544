"""Computation of one attention row of a model."""

import torch
from torch import Tensor

from thinker.interpretability.attention_row import HeadScores, report_attention_row
from thinker.interpretability.reports import Prompt, Report
from thinker.model import Thinker
from thinker.model.attention import LinearAttention
from thinker.model.patterns.patterns import TokenInfo
from thinker.runtime.errors import UserError


@torch.no_grad()
def explain(model: Thinker, prompt: Prompt, layer: int, head: int, query: int) -> Report:
    """Explain one attention row step by step (Vaswani et al. 2017, eq. 1). Raises UserError for linear attention."""
    attention = model.blocks[layer].attention
    if isinstance(attention, LinearAttention):
        raise UserError(
            f"layer {layer} uses linear attention, which has no scores; use another --layer"
        )
    path, query = f"blocks.{layer}.attention", query % len(prompt.tokens)
    names = [f"{path}.{part}" for part in ("q", "k", "v", "weights", "heads")]
    with model.record(*names) as cache:
        model(prompt.tokens[None])
    q, k, v, weights, z = (cache[name][0].double().cpu() for name in names)
    kv_head = head // (len(q) // len(k))
    raw = q[head] @ k[kv_head].T  # (T, T)
    scaled, temperature = raw * attention.scale, model.config.attention_temperature
    divisor = f"{'' if temperature == 1 else f'{temperature:g}'}√{q.shape[-1]}"
    cap = model.config.attn_logit_softcap
    capped = scaled if cap is None else cap * torch.tanh(scaled / cap)
    bias, visible = _bias_and_mask(model, prompt.tokens, layer, head, capped, q, k)
    shared = f" (KV head {kv_head})" if len(q) > len(k) else ""
    found = HeadScores(
        prompt.labels, divisor, raw, scaled, capped, bias, visible, weights[head], v[kv_head], z[head],
        sink=None if attention.sinks is None else attention.sinks[head].item(),
        has_cap=cap is not None, has_bias=model.config.positions == "alibi",
    )  # fmt: skip
    data = {"layer": layer, "head": head, "q": q[head, query].tolist()}
    return report_attention_row(found, query, {"layer": layer, "head": f"{head}{shared}"}, data)


def _bias_and_mask(
    model: Thinker, tokens: Tensor, layer: int, head: int, scores: Tensor, q: Tensor, k: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the bias of one head (0 where masked) and its visible keys: scores (T, T) -> (T, T) each."""
    T, builder = len(tokens), model.mask_builder
    shape = 1, model.blocks[layer].attention.n_heads, T, T
    token_info = TokenInfo(
        torch.arange(T, device=model.device), token_id=tokens if builder.by_token else None
    )
    mask_form = builder.reference_mask(builder.patterns[layer], token_info)
    bias, visible = torch.zeros(()), mask_form.allowed
    if visible is not None and visible.dtype != torch.bool:  # ALiBi's biases, -inf where masked
        bias, visible = visible.cpu(), visible > -torch.inf
    bias = bias.expand(shape)[0, head]
    if mask_form.content_mask is not None:
        inputs = (
            x.float().to(model.device) for x in (q[None], k[None], (scores + bias)[None, None])
        )
        visible = mask_form.content_mask(*inputs)
    visible = visible.cpu().expand(shape)[0, head]
    return bias.double().masked_fill(~visible, 0), visible
