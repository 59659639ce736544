"""Reports on one prompt: attention map, flow, attribution, logit lens and patching."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thinker.data.tokenizers.token_label import token_label
from thinker.data.tokenizers.tokenizer import Tokenizer
from thinker.interpretability import attribution, flow, reports
from thinker.interpretability.attribution import LogitComponents
from thinker.interpretability.reports import Panel, Prompt, Report, decimal
from thinker.model import Thinker
from thinker.runtime.errors import UserError

NO_GRADIENT = "the attention pattern depends on token ids, which have no gradients"
MAX_LENS_COLUMNS = 16  # positions in the lens plot, up to the requested one
MAX_FLOW_TOKENS = 64  # one maximum flow per token


@dataclass(frozen=True)
class ChosenHead:
    """The head that the likeliest next token of a prompt needs most."""

    layer: int
    head: int
    token: int  # the likeliest next token
    before: float  # its probability
    after: float  # without the head
    among: str = ""  # which heads were compared, if not all

    def describe(self, tokenizer: Tokenizer) -> str:
        """Say why it was chosen."""
        token = token_label(tokenizer, self.token)
        change = f"from {self.before:.3g} to {self.after:.3g}"
        return (
            f"the likeliest next token ‘{token}’ needs this head most{self.among}: its probability "
            f"goes {change} without it"
        )


@torch.no_grad()
def choose_head(
    model: Thinker, prompt: Prompt, layer: int | None = None, head: int | None = None
) -> ChosenHead:
    """The head that the likeliest next token needs most: with the head's output set to zero, the
    probability of that token is lowest.

    layer, head: only heads of this layer, or with this number in their layer; None: all. At least
    one must exist.
    """
    tokens = prompt.tokens[None]
    before = model(tokens)[0, -1].float().log_softmax(-1)  # (V,)
    token = int(before.argmax())
    found = []
    for index, block in enumerate(model.blocks):
        for number in range(block.attention.n_heads):
            if layer not in (None, index) or head not in (None, number):
                continue
            with model.patch({f"blocks.{index}.attention.heads.{number}": 0.0}):
                after = model(tokens)[0, -1].float().log_softmax(-1)
            found.append((after[token].item(), index, number))
    value, index, number = min(found)
    among = ""
    if layer is not None:
        among = f" of those in layer {layer}"
    elif head is not None:
        among = f" of those with number {head}"
    return ChosenHead(index, number, token, before[token].exp().item(), math.exp(value), among)


def report_attention_map(
    model: Thinker, prompt: Prompt, layer: int, head: int, chosen: str | None = None
) -> Report:
    """Report the three largest weights of each token in one head.

    chosen: why this head was chosen, for the header.
    """
    name = f"blocks.{layer}.attention.weights"
    with torch.no_grad(), model.record(name) as cache:
        model(prompt.tokens[None])
    weights = cache[name][0, head].cpu()  # (T, T)
    rows = []
    for query, text in enumerate(prompt.labels):
        # Fewer than three for the first tokens, and where the pattern leaves fewer visible.
        top = weights[query].topk(min(3, query + 1))
        cells = []
        for value, key in zip(top.values.tolist(), top.indices.tolist()):
            if value > 0:
                cells.append(f"{value:.2f} {prompt.labels[key]} ({key})")
        cells += [""] * (3 - len(cells))
        rows.append([str(query), text, *cells])
    data = {"layer": layer, "head": head, "tokens": prompt.labels, "weights": weights.tolist()}
    names = prompt.numbered()
    panel = Panel(
        f"attention weights, layer {layer}, head {head}",
        weights.masked_fill(weights == 0, torch.nan),
        names,
        names,
        vmax=1.0,
        axis_labels=reports.ATTENTION_AXES,
    )
    columns = ["query", "token", "attends most to", "second", "third"]
    header: dict[str, Any] = {"layer": layer, "head": head}
    if chosen is not None:
        header["chosen"] = chosen
        data["chosen"] = chosen
    return Report(header, columns, rows, data, [panel])


@torch.no_grad()
def report_flow(model: Thinker, prompt: Prompt, position: int) -> Report:
    """Report what one position receives from every token: attention rollout and maximum flow."""
    position %= len(prompt.tokens)
    weights = model.attention_weights(prompt.tokens[None])[:, 0].cpu()  # (layers, H, T, T)
    rollout = flow.rollout(weights)[:, position]  # (layers, T)
    layers = reports.layer_labels(len(rollout))
    columns = ["key", "token", *layers]
    rows = []
    for key, text in enumerate(prompt.labels):
        shares = [f"{share:.3f}" for share in rollout[:, key].tolist()]
        rows.append([str(key), text, *shares])
    footer = "layer columns: share of each token in the position (rollout)"
    flows = None  # as JSON, where there is always this key
    if len(prompt.tokens) <= MAX_FLOW_TOKENS:
        flows = flow.max_flow(weights, position).tolist()
        columns.append("max flow")
        for row, value in zip(rows, flows):
            row.append(f"{value:.3f}")
        footer += "; max flow: upper bound on what the position receives"
    else:
        footer += f"; max flow skipped: too slow beyond {MAX_FLOW_TOKENS} tokens"
    data = {
        "position": position,
        "tokens": prompt.labels,
        "rollout": rollout.tolist(),
        "max_flow": flows,
    }
    title = f"rollout: share of each token in position {position}"
    panel = Panel(title, rollout, layers, prompt.numbered())
    header = {"position": f"{position} {prompt.labels[position]}"}
    return Report(header, columns, rows, data, [panel], footer)


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
    description = f"‘{token_label(tokenizer, target)}’"
    if contrast_token is not None:
        description += f" rather than ‘{token_label(tokenizer, contrast_token)}’"
    return description


def report_attribution(
    model: Thinker,
    tokenizer: Tokenizer,
    prompt: Prompt,
    target: int | None,
    contrast_token: int | None,
    position: int,
) -> Report:
    """Report contributions of tokens and of components to a prediction.

    Tokens by integrated gradients, components by direct logit attribution.
    """
    if target is None:
        target = likeliest_next_token(model, prompt, position, contrast_token)
    prediction = target, contrast_token, position
    components = attribution.direct_logit_attribution(model, prompt.tokens, *prediction)
    description = _describe_target(tokenizer, target, contrast_token)
    header = {
        "prediction": f"{description}, after position {position % len(prompt.labels)}",
        "logit": f"{components.logit:.4f}",
    }
    data: dict[str, Any] = {
        "prediction": description,
        "target": target,
        "contrast_token": contrast_token,
        "tokens": prompt.labels,
        "logit": components.logit,
        "embedding": components.embedding,
        "heads": reports.to_json(components.heads),
        "mlps": components.mlps.tolist(),
        "biases": components.biases,
    }
    rows = _component_rows(components)
    labels = reports.head_labels(components.heads)
    panels = [Panel("direct logit attribution of heads", components.heads, *labels, signed=True)]
    total = components.embedding + components.heads.nansum().item() + components.mlps.sum().item()
    total += components.biases
    footer = f"sum of components: {total:.4f}; "

    # A pattern that reads token ids cannot run on embeddings, which have gradients.
    if any(pattern.tokens for pattern in model.config.patterns):
        footer += f"no attribution to tokens: {NO_GRADIENT}"
        return Report(header, ["kind", "name", "adds"], rows, data, panels, footer)
    bos = None
    if tokenizer.bos_prefix:
        bos = tokenizer.bos_prefix[0]
    values, baseline, error = attribution.integrated_gradients(
        model, prompt.tokens, *prediction, bos
    )
    data["by_token"] = values.tolist()
    data["completeness_error"] = error
    data["baseline_logit"] = baseline
    # Tokens come first, as they are what a reader looks for.
    token_rows = []
    for text, value in zip(prompt.numbered(), values.tolist()):
        token_rows.append(["token", text, decimal(value, 4, "+")])
    rows = token_rows + rows
    title = f"integrated gradients of {description}"
    panels.insert(0, Panel(title, values[None], [""], prompt.labels, signed=True, style="text"))
    footer += f"sum of tokens and baseline ({baseline:.4f}): {components.logit + error:.4f}"
    if abs(error) > 0.05 * max(1, abs(components.logit - baseline)):
        footer += " (the integral did not converge, so treat token values with care)"
    return Report(header, ["kind", "name", "adds"], rows, data, panels, footer)


def _component_rows(components: LogitComponents) -> list[list[str]]:
    """A row for the embedding, each MLP, each head and the biases, the largest contribution
    first."""
    values = {"embedding": components.embedding}
    if components.biases:
        values["biases"] = components.biases
    for layer, value in enumerate(components.mlps.tolist()):
        values[f"MLP {layer}"] = value
    for layer, head in reports.existing_heads(components.heads):
        values[f"head {layer}.{head}"] = components.heads[layer, head].item()
    ranked = sorted(values.items(), key=lambda pair: -abs(pair[1]))
    rows = []
    for name, value in ranked:
        rows.append(["component", name, decimal(value, 4, "+")])
    return rows


def _after_names(model: Thinker) -> list[str]:
    """The places of the residual stream: after the embedding and after each layer."""
    return ["embedding", *reports.layer_labels(len(model.blocks))]


def report_logit_lens(
    model: Thinker, tokenizer: Tokenizer, prompt: Prompt, position: int
) -> Report:
    """Report the three most likely tokens after each layer at one position (logit lens)."""
    position %= len(prompt.tokens)
    shown = slice(max(0, position - MAX_LENS_COLUMNS + 1), position + 1)
    logits = attribution.logit_lens(model, prompt.tokens, shown)
    probabilities = logits.softmax(dim=-1).cpu()  # (layers + 1, T', V)
    names = _after_names(model)
    likeliest = []
    rows = []
    for name, at_position in zip(names, probabilities[:, -1]):
        top = _likeliest_tokens(tokenizer, at_position)
        likeliest.append(top)
        cells = [f"{entry['probability']:.3f} {entry['token']}" for entry in top]
        rows.append([name, *cells])
    best = probabilities.max(dim=-1)  # (layers + 1, T') each
    cells = _token_labels(tokenizer, best.indices)
    data = {
        "position": position,
        "after": names,
        "likeliest": likeliest,
        "tokens": prompt.labels[shown],
        "top_token": cells,
        "probability": best.values.tolist(),
    }
    title = "most likely next token after each layer, and its probability"
    n_shown = probabilities.shape[1]
    if n_shown < len(prompt.tokens):
        title += f" (last {n_shown} of {position + 1} positions)"
    columns = prompt.numbered()[shown]
    panel = Panel(title, best.values, names, columns, vmax=1.0, style="table", cells=cells)
    header = {"position": f"{position} {prompt.labels[position]}"}
    # A vocabulary may have fewer than three tokens.
    columns = ["after", "most likely", "second", "third"][: len(rows[0])]
    return Report(header, columns, rows, data, [panel])


def _likeliest_tokens(tokenizer: Tokenizer, probabilities: Tensor) -> list[dict[str, Any]]:
    """The three most likely tokens: probabilities (V,) -> an entry for JSON each."""
    top = probabilities.topk(min(3, len(probabilities)))
    entries = []
    for probability, token in zip(top.values.tolist(), top.indices.tolist()):
        label = token_label(tokenizer, token)
        entries.append({"token": label, "id": token, "probability": probability})
    return entries


def _token_labels(tokenizer: Tokenizer, ids: Tensor) -> list[list[str]]:
    """Labels of a matrix of token ids."""
    rows = []
    for row in ids.tolist():
        rows.append([token_label(tokenizer, token) for token in row])
    return rows


def report_patching(
    model: Thinker,
    tokenizer: Tokenizer,
    clean: Prompt,
    corrupt: Prompt,
    target: int | None,
    contrast_token: int | None,
) -> Report:
    """Report the share of a prediction that each activation of the clean prompt restores."""
    if target is None:
        target = likeliest_next_token(model, clean, -1, contrast_token)
    restored = attribution.patch(model, clean.tokens, corrupt.tokens, target, contrast_token)
    values = torch.stack([x.cpu() for x in restored.values()])  # (layers + 1, T)
    names = _after_names(model)
    tokens = []
    for text, other in zip(clean.labels, corrupt.labels):
        if text != other:
            text = f"{text}/{other}"
        tokens.append(text)
    rows = []
    for position, text in enumerate(tokens):
        shares = [decimal(share, 3) for share in values[:, position].tolist()]  # by layer
        rows.append([str(position), text, *shares])
    description = _describe_target(tokenizer, target, contrast_token)
    data = {"target": target, "contrast_token": contrast_token, "tokens": tokens}
    for name, shares in restored.items():
        data[name] = shares.tolist()
    title = f"share of {description} restored by patching"
    panel = Panel(title, values, names, reports.numbered(tokens), signed=True)
    header = {
        "prediction": description,
        "clean": "".join(clean.labels),
        "corrupt": "".join(corrupt.labels),
    }
    footer = "0: patching restores none of the clean prediction; 1: it restores all of it"
    return Report(header, ["position", "token", *names], rows, data, [panel], footer)
