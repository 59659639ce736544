"""One attention row, number by number."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from thinker.interpretability.reports import ATTENTION_AXES, Panel, Prompt, Report
from thinker.model import Thinker
from thinker.model.attention import LinearAttention
from thinker.model.patterns import TokenInfo
from thinker.runtime.errors import UserError


@torch.no_grad()
def explain(model: Thinker, prompt: Prompt, layer: int, head: int, query: int) -> Report:
    """Every number of one attention row (Vaswani et al. 2017, eq. 1). Raises UserError for linear attention."""
    attention = model.blocks[layer].attention
    if isinstance(attention, LinearAttention):
        raise UserError(f"layer {layer} is linear attention: it has sums over features instead of scores")
    path, query = f"blocks.{layer}.attention", query % len(prompt.tokens)
    names = [f"{path}.{part}" for part in ("q", "k", "v", "weights", "heads")]
    with model.record(*names) as cache:
        model(prompt.tokens[None])
    q, k, v, weights, z = (cache[name][0].double().cpu() for name in names)
    kv_head = head // (len(q) // len(k))
    raw = q[head] @ k[kv_head].T  # (T, T)
    scaled = raw * q.shape[-1] ** -0.5
    cap = model.config.attn_logit_softcap
    capped = scaled if cap is None else cap * torch.tanh(scaled / cap)
    bias, visible = _bias_and_mask(model, prompt.tokens, layer, head, capped)
    scores = capped + bias
    sink = None if attention.sinks is None else attention.sinks[head].item()
    row, mask, norms = weights[head, query], visible[query], v[kv_head].norm(dim=-1)  # (T,) each
    logits = scores[query, mask].tolist() + ([] if sink is None else [sink])
    largest = max(logits, default=0.0)
    exponentials = (scores[query] - largest).exp()  # (T,)
    total = exponentials[mask].sum().item()
    sink_share = 0.0 if sink is None else math.exp(sink - largest)
    output, actual = row @ v[kv_head], z[head, query]  # (D,) each
    footer = f"Σ exp = {total + sink_share:.4f}{'' if sink is None else f', including {sink_share:.4f} of the sink'}; "
    footer += f"the weighted sum of the values has norm {output.norm():.4f}, the head's output {actual.norm():.4f}"
    steps = {"q·k": raw[query], f"÷ √{q.shape[-1]}": scaled[query]}
    if cap is not None:
        steps["capped"] = capped[query]
    if model.config.positions == "alibi":
        steps["bias"] = bias[query]
    rows = []
    for key, text in enumerate(prompt.labels):
        softmax = ["yes", f"{exponentials[key]:.4f}", f"{row[key]:.4f}"] if mask[key] else ["no", "", "0"]
        products = [f"{norms[key]:.4f}", f"{row[key] * norms[key]:.4f}"]
        rows.append([str(key), text, *(f"{values[key]:.4f}" for values in steps.values()), *softmax, *products])
    columns = ["key", "token", *steps, "visible", f"exp(· − {largest:.2f})", "weight", "|v|", "weight·|v|"]
    shared = f", which shares KV head {kv_head}" if len(q) > len(k) else ""
    header = {"layer": layer, "head": f"{head}{shared}", "query": f"{query} {prompt.labels[query]}"}
    data = {"layer": layer, "head": head, "query": query, "tokens": prompt.labels, "q": q[head, query].tolist()}
    data |= {"scores": raw[query].tolist(), "scaled": scaled[query].tolist(), "capped": capped[query].tolist()}
    data |= {"bias": bias[query].tolist(), "sink": sink, "visible": mask.tolist(), "weights": row.tolist()}
    data |= {"values": v[kv_head].tolist(), "output": output.tolist(), "head_output": actual.tolist()}
    labels, panels = prompt.numbered(), []
    for title, values, signed in (
        ("scores, scaled", scores, True),
        ("scores after the mask", scores.masked_fill(~visible, torch.nan), True),
        ("softmax: the weights", weights[head].masked_fill(~visible, torch.nan), False),
        ("softmax without the mask", scores.softmax(dim=-1), False),
    ):
        panels.append(Panel(title, values, labels, labels, signed, highlighted_row=query, axis_labels=ATTENTION_AXES))
    return Report(header, columns, rows, data, panels, footer, panels_per_row=2)


def _bias_and_mask(model: Thinker, tokens: Tensor, layer: int, head: int, scores: Tensor) -> tuple[Tensor, Tensor]:
    """What is added to one head's scores (0 where masked), and which keys are visible: scores (T, T) -> (T, T) each."""
    T, builder = len(tokens), model.mask_builder
    shape = 1, model.blocks[layer].attention.n_heads, T, T
    token_info = TokenInfo(torch.arange(T, device=model.device), token_id=tokens if builder.by_token else None)
    mask_form = builder.reference_mask(builder.patterns[layer], token_info)
    bias, visible = torch.zeros(()), mask_form.allowed
    if visible is not None and visible.dtype != torch.bool:  # ALiBi's biases, -inf where masked
        bias, visible = visible.cpu(), visible > -torch.inf
    bias = bias.expand(shape)[0, head]
    if mask_form.score_mask is not None:
        visible = mask_form.score_mask((scores + bias)[None, None].float().to(model.device), slice(None))
    visible = visible.cpu().expand(shape)[0, head]
    return bias.double().masked_fill(~visible, 0), visible
