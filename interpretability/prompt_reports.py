"""Reports on one prompt: attention map, flow, attribution, logit lens and patching."""

import torch

from thinker.data.tokenizers.tokenizer import Tokenizer
from thinker.interpretability import attribution, flow, reports
from thinker.interpretability.reports import Panel, Prompt, Report, decimal, token_label
from thinker.model import Thinker
from thinker.runtime.errors import UserError

NO_GRADIENT = "the attention pattern depends on token ids, which have no gradients"
MAX_LENS_COLUMNS = 16  # positions in the lens plot, up to the requested one
MAX_FLOW_TOKENS = 64  # one maximum flow per token


def report_attention_map(model: Thinker, prompt: Prompt, layer: int, head: int) -> Report:
    """Report the three largest weights of each token in one head."""
    name = f"blocks.{layer}.attention.weights"
    with torch.no_grad(), model.record(name) as cache:
        model(prompt.tokens[None])
    weights, rows = cache[name][0, head].cpu(), []  # (T, T)
    for query, text in enumerate(prompt.labels):
        top = weights[query].topk(min(3, query + 1))
        pairs = zip(top.values.tolist(), top.indices.tolist())
        cells = [f"{value:.2f} {prompt.labels[key]} ({key})" for value, key in pairs if value > 0]
        rows.append([str(query), text, *cells, *[""] * (3 - len(cells))])
    data = {"layer": layer, "head": head, "tokens": prompt.labels, "weights": weights.tolist()}
    names = prompt.numbered()
    title, nonzero = (
        f"attention weights, layer {layer}, head {head}",
        weights.masked_fill(weights == 0, torch.nan),
    )
    panel = Panel(title, nonzero, names, names, vmax=1.0, axis_labels=reports.ATTENTION_AXES)
    columns = ["query", "token", "attends most to", "second", "third"]
    return Report({"layer": layer, "head": head}, columns, rows, data, [panel])


@torch.no_grad()
def report_flow(model: Thinker, prompt: Prompt, position: int) -> Report:
    """Report attention rollout after each layer and maximum flow, from one position to every token."""
    position %= len(prompt.tokens)
    weights = model.attention_weights(prompt.tokens[None])[:, 0].cpu()  # (layers, H, T, T)
    rollout = flow.rollout(weights)[:, position]  # (layers, T)
    layers = [f"layer {layer}" for layer in range(len(rollout))]
    columns, flows = ["key", "token", *layers], None
    rows = [
        [str(key), text, *(f"{x:.3f}" for x in rollout[:, key].tolist())]
        for key, text in enumerate(prompt.labels)
    ]
    footer = "layer columns: share of each token in the position (rollout)"
    if len(prompt.tokens) <= MAX_FLOW_TOKENS:
        flows = flow.max_flow(weights, position).tolist()
        columns.append("max flow")
        rows = [[*row, f"{x:.3f}"] for row, x in zip(rows, flows)]
        footer += "; max flow: upper bound on what the position receives"
    else:
        footer += f"; max flow skipped: too slow beyond {MAX_FLOW_TOKENS} tokens"
    data = {
        "position": position,
        "tokens": prompt.labels,
        "rollout": rollout.tolist(),
        "max_flow": flows,
    }
    panel = Panel(
        f"rollout: share of each token in position {position}", rollout, layers, prompt.numbered()
    )
    return Report(
        {"position": f"{position} {prompt.labels[position]}"}, columns, rows, data, [panel], footer
    )


@torch.no_grad()
def likeliest_next_token(
    model: Thinker, prompt: Prompt, position: int, contrast_token: int | None = None
) -> int:
    """Return the most likely token after a position. Raises UserError if it is `contrast_token`."""
    token = int(model(prompt.tokens[None])[0, position].argmax())
    if token == contrast_token:
        problem = "--contrast-token is the most likely next token, which is also the default target"
        raise UserError(f"{problem}; add --target TOKEN")
    return token


def _describe_target(tokenizer: Tokenizer, target: int, contrast_token: int | None) -> str:
    """Describe a prediction, such as: ‘b’ rather than ‘c’."""
    tokens = [target] if contrast_token is None else [target, contrast_token]
    return " rather than ".join(f"‘{token_label(tokenizer, token)}’" for token in tokens)


def report_attribution(
    model: Thinker,
    tokenizer: Tokenizer,
    prompt: Prompt,
    target: int | None,
    contrast_token: int | None,
    position: int,
) -> Report:
    """Report contributions of tokens (integrated gradients) and components (direct logit attribution)."""
    target = (
        likeliest_next_token(model, prompt, position, contrast_token) if target is None else target
    )
    prediction = target, contrast_token, position
    components = attribution.direct_logit_attribution(model, prompt.tokens, *prediction)
    values = {"embedding": components.embedding}
    values |= {f"MLP {layer}": value for layer, value in enumerate(components.mlps.tolist())}
    values |= {
        f"head {i}.{j}": components.heads[i, j].item()
        for i, j in reports.existing_heads(components.heads)
    }
    ranked = sorted(values.items(), key=lambda pair: -abs(pair[1]))
    rows = [["component", name, decimal(value, 4, "+")] for name, value in ranked]
    description = _describe_target(tokenizer, target, contrast_token)
    header = {"prediction": f"{description}, after position {position % len(prompt.labels)}"}
    header["logit"] = f"{components.logit:.4f}"
    data = {
        "prediction": description,
        "target": target,
        "contrast_token": contrast_token,
        "tokens": prompt.labels,
    }
    data |= {"logit": components.logit, "embedding": components.embedding}
    data |= {"heads": reports.to_json(components.heads), "mlps": components.mlps.tolist()}
    labels = reports.head_labels(components.heads)
    panels = [Panel("direct logit attribution of heads", components.heads, *labels, signed=True)]
    total = components.embedding + components.heads.nansum().item() + components.mlps.sum().item()
    footer = f"sum of components: {total:.4f}; "
    if any(
        pattern.tokens for pattern in model.config.patterns
    ):  # such a model cannot run on embeddings only
        footer += f"no attribution to tokens: {NO_GRADIENT}"
    else:
        bos = tokenizer.bos_prefix[0] if tokenizer.bos_prefix else None
        values, baseline, error = attribution.integrated_gradients(
            model, prompt.tokens, *prediction, bos
        )
        data |= {
            "by_token": values.tolist(),
            "completeness_error": error,
            "baseline_logit": baseline,
        }
        rows = [
            ["token", text, decimal(x, 4, "+")]
            for text, x in zip(prompt.numbered(), values.tolist())
        ] + rows
        title = f"integrated gradients of {description}"
        panels.insert(0, Panel(title, values[None], [""], prompt.labels, signed=True, style="text"))
        footer += f"sum of tokens and baseline ({baseline:.4f}): {components.logit + error:.4f}"
        if abs(error) > 0.05 * max(1, abs(components.logit - baseline)):
            footer += " (the integral did not converge, so treat token values with care)"
    return Report(header, ["kind", "name", "adds"], rows, data, panels, footer)


def report_logit_lens(
    model: Thinker, tokenizer: Tokenizer, prompt: Prompt, position: int
) -> Report:
    """Report the three most likely tokens after each layer at one position (logit lens)."""
    position %= len(prompt.tokens)
    shown = slice(max(0, position - MAX_LENS_COLUMNS + 1), position + 1)
    probabilities = (
        attribution.logit_lens(model, prompt.tokens, shown).softmax(dim=-1).cpu()
    )  # (layers + 1, T', V)
    names = ["embedding", *(f"layer {layer}" for layer in range(len(model.blocks)))]
    likeliest, rows = [], []
    for name, row in zip(names, probabilities[:, -1]):
        top = zip(*(part.tolist() for part in row.topk(min(3, len(row)))))
        likeliest.append(
            [{"token": token_label(tokenizer, i), "id": i, "probability": p} for p, i in top]
        )
        rows.append(
            [name, *(f"{entry['probability']:.3f} {entry['token']}" for entry in likeliest[-1])]
        )
    best = probabilities.max(dim=-1)  # (layers + 1, T') each
    cells = [[token_label(tokenizer, token) for token in row] for row in best.indices.tolist()]
    data = {
        "position": position,
        "after": names,
        "likeliest": likeliest,
        "tokens": prompt.labels[shown],
    }
    data |= {"top_token": cells, "probability": best.values.tolist()}
    title, n_shown = (
        "most likely next token after each layer, and its probability",
        probabilities.shape[1],
    )
    if n_shown < len(prompt.tokens):
        title += f" (last {n_shown} of {position + 1} positions)"
    panel = Panel(
        title, best.values, names, prompt.numbered()[shown], vmax=1.0, style="table", cells=cells
    )
    header = {"position": f"{position} {prompt.labels[position]}"}
    return Report(
        header, ["after", "most likely", "second", "third"][: len(rows[0])], rows, data, [panel]
    )


def report_patching(
    model: Thinker,
    tokenizer: Tokenizer,
    clean: Prompt,
    corrupt: Prompt,
    target: int | None,
    contrast_token: int | None,
) -> Report:
    """Report the share of a prediction that each activation of the clean prompt restores."""
    target = likeliest_next_token(model, clean, -1, contrast_token) if target is None else target
    restored = attribution.patch(model, clean.tokens, corrupt.tokens, target, contrast_token)
    values = torch.stack([x.cpu() for x in restored.values()])  # (layers + 1, T)
    names = ["embedding", *(f"layer {layer}" for layer in range(len(model.blocks)))]
    tokens = [a if a == b else f"{a}/{b}" for a, b in zip(clean.labels, corrupt.labels)]
    rows = [
        [str(i), text, *(decimal(x, 3) for x in values[:, i].tolist())]
        for i, text in enumerate(tokens)
    ]
    description = _describe_target(tokenizer, target, contrast_token)
    data = {"target": target, "contrast_token": contrast_token, "tokens": tokens}
    data |= {name: x.tolist() for name, x in restored.items()}
    columns = [f"{i} {text}" for i, text in enumerate(tokens)]
    panel = Panel(
        f"share of {description} restored by patching", values, names, columns, signed=True
    )
    header = {
        "prediction": description,
        "clean": "".join(clean.labels),
        "corrupt": "".join(corrupt.labels),
    }
    footer = "0: patching restores none of the clean prediction; 1: it restores all of it"
    return Report(header, ["position", "token", *names], rows, data, [panel], footer)
