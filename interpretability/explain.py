"""One attention row, number by number."""

from __future__ import annotations

import math

import torch

from thinker.interpretability.reports import AXES, Panel, Prompt, Report
from thinker.model import Thinker
from thinker.model.linear_attention import LinearAttention
from thinker.model.patterns import TokenInfo
from thinker.runtime.errors import UserError


@torch.no_grad()
def explain(model: Thinker, prompt: Prompt, layer: int, head: int, query: int) -> Report:
    """Every number of one attention row: scores, scaling, mask, softmax, weighted sum (Vaswani et al. 2017, eq. 1).

    Raises UserError for a layer of linear attention, which has no scores.
    """
    attention, T = model.blocks[layer].attention, len(prompt.tokens)
    if isinstance(attention, LinearAttention):
        raise UserError(f"layer {layer} is linear attention: it has sums over features instead of scores")
    path, query = f"blocks.{layer}.attention", query % T
    names = [f"{path}.{part}" for part in ("q", "k", "v", "weights", "heads")]
    with model.record(*names) as seen:
        model(prompt.tokens[None])
    q, k, v, weights, z = (seen[name][0].double().cpu() for name in names)
    group = head // (len(q) // len(k))  # the key head that this query head shares
    raw = q[head] @ k[group].T  # (T, T)
    scaled = raw * q.shape[-1] ** -0.5
    cap = model.config.attn_logit_softcap
    capped = scaled if cap is None else cap * torch.tanh(scaled / cap)

    builder, at = model.mask_builder, torch.arange(T, device=model.device)
    token_info = TokenInfo(at, token_id=prompt.tokens if builder.by_token else None)
    mask_form = builder.reference_mask(builder.patterns[layer], token_info)
    bias, allowed = torch.zeros(()), mask_form.allowed
    if allowed is not None and allowed.dtype != torch.bool:  # numbers that are added to scores: ALiBi
        bias, allowed = allowed.cpu(), allowed > -torch.inf
    if mask_form.score_mask is not None:
        bias_here = bias.expand(1, len(q), T, T)[0, head]
        allowed = mask_form.score_mask((capped + bias_here)[None, None].float().to(at.device), slice(None))
    visible = allowed.cpu().expand(1, len(q), T, T)[0, head]  # (T, T)
    bias = bias.expand(1, len(q), T, T)[0, head].double().masked_fill(~visible, 0)
    final = capped + bias
    sink = None if attention.sinks is None else attention.sinks[head].item()

    row, mask, sizes = weights[head, query], visible[query], v[group].norm(dim=-1)  # (T,) each
    largest = max([*final[query, mask].tolist(), *([] if sink is None else [sink])], default=0.0)
    shares = (final[query] - largest).exp()  # (T,)
    total = shares[mask].sum().item() + (0 if sink is None else math.exp(sink - largest))
    steps = {"q·k": raw[query], f"÷ √{q.shape[-1]}": scaled[query]}
    steps |= {"capped": capped[query]} if cap is not None else {}
    steps |= {"bias": bias[query]} if model.config.positions == "alibi" else {}
    rows = [
        [str(key), text, *(f"{values[key]:.4f}" for values in steps.values())]
        + (["yes", f"{shares[key]:.4f}", f"{row[key]:.4f}"] if mask[key] else ["no", "", "0"])
        + [f"{sizes[key]:.4f}", f"{row[key] * sizes[key]:.4f}"]
        for key, text in enumerate(prompt.labels)
    ]
    columns = ["key", "token", *steps, "seen", f"exp(· − {largest:.2f})", "weight", "|v|", "weight·|v|"]
    made = row @ v[group]  # (D,)
    after = f"Σ exp = {total:.4f}" + ("" if sink is None else f", with {math.exp(sink - largest):.4f} of the sink")
    after += f"; the weighted sum of the values has the length {made.norm():.4f}, the head's output "
    after += f"{z[head, query].norm():.4f}"
    about = {"layer": layer, "head": str(head), "query": f"{query} {prompt.labels[query]}"}
    about["head"] += f", which shares key head {group}" if len(q) > len(k) else ""
    data = {"layer": layer, "head": head, "query": query, "tokens": prompt.labels, "q": q[head, query].tolist()}
    data |= {"scores": raw[query].tolist(), "scaled": scaled[query].tolist(), "capped": capped[query].tolist()}
    data |= {"bias": bias[query].tolist(), "sink": sink, "seen": mask.tolist(), "weights": row.tolist()}
    data |= {"values": v[group].tolist(), "output": made.tolist(), "head_output": z[head, query].tolist()}

    names = prompt.numbered()
    pictures = (
        ("scores, scaled", final, True),
        ("masked: what is not seen is left out", final.masked_fill(~visible, torch.nan), True),
        ("softmax: the weights", weights[head].masked_fill(~visible, torch.nan), False),
        ("softmax, had every token been seen", final.softmax(dim=-1), False),
    )
    panels = [Panel(title, x, names, names, signed, row=query, axes=AXES) for title, x, signed in pictures]
    return Report(about, columns, rows, data, panels, after, across=2)
