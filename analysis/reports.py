"""What scripts/inspect_model.py shows: each report is a table to read, numbers for JSON, and panels to draw."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from analysis import attribution, flow, heads
from data.tokenizer import Tokenizer
from errors import UserError
from model import Thinker

MOST_FLOWS = 64  # positions, each of which takes a maximum flow from every other


@dataclass(frozen=True)
class Panel:
    """A matrix to be drawn as a heatmap: values (rows, columns), with a label for each row and column."""

    title: str
    values: Tensor
    rows: list[str]
    columns: list[str]
    signed: bool = False  # colors from below zero to above it
    top: float | None = None  # where colors end; the largest value unless given


@dataclass(frozen=True)
class Report:
    """`rows` of cells under `columns`, after `about`, which is said first; `data`: all of it, unrounded."""

    about: dict[str, Any]
    columns: list[str]
    rows: list[list[str]]
    data: dict[str, Any]
    panels: list[Panel] = field(default_factory=list)
    after: str = ""

    def table(self) -> str:
        """As text: columns as wide as their cells."""
        lines = [f"{name:>12}  {value}" for name, value in self.about.items()]
        cells = [self.columns, *self.rows]
        widths = [max(len(row[at]) for row in cells) for at in range(len(self.columns))]
        lines += [""] + ["  ".join(cell.rjust(width) for cell, width in zip(row, widths)).rstrip() for row in cells]
        return "\n".join([*lines, "", self.after] if self.after else lines)


@dataclass(frozen=True)
class Prompt:
    """A text as the model reads it: ids (T,), and what each of them says."""

    tokens: Tensor
    labels: list[str]

    @classmethod
    def read(cls, thinker: Thinker, tokenizer: Tokenizer, text: str) -> Prompt:
        """Begun as all its texts. Raises UserError where there are fewer than two tokens, or more than the context."""
        ids = [*tokenizer.prompt_start, *tokenizer.encode(text)]
        if not 2 <= len(ids) <= thinker.config.max_seq_len:
            raise UserError(f"the prompt has {len(ids)} tokens; there must be 2 to {thinker.config.max_seq_len}")
        return cls(torch.tensor(ids, device=thinker.device), [label(tokenizer, i) for i in ids])

    def numbered(self) -> list[str]:
        """Position and token: equal tokens have to be told apart."""
        return [f"{at} {text}" for at, text in enumerate(self.labels)]


def label(tokenizer: Tokenizer, token: int) -> str:
    """A token as people can read it: special ones by name, spaces and controls visible, parts of characters in hex."""
    names = {number: name for name, number in tokenizer.special_tokens.items()}
    if token in names:
        return names[token]
    data = tokenizer.token_bytes(token)
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return "".join(f"\\x{byte:02x}" for byte in data)
    return "".join("·" if c == " " else c if c.isprintable() else repr(c)[1:-1] for c in text) or f"<{token}>"


def explain(thinker: Thinker, prompt: Prompt, layer: int, head: int, query: int) -> Report:
    """Every number of one attention row: scores, scaling, mask, softmax, weighted sum (Vaswani et al. 2017, eq. 1)."""
    path, query = f"blocks.{layer}.attention", query % len(prompt.tokens)
    names = [f"{path}.{part}" for part in ("q", "k", "v", "weights", "heads")]
    with torch.no_grad(), thinker.tap(*names) as seen:
        thinker(prompt.tokens[None])
    q, k, v, weights, z = (seen[name][0].double().cpu() for name in names)
    group = head // (len(q) // len(k))  # the key head that this query head shares
    scores = k[group] @ q[head, query]  # (T,)
    scaled = scores * q.shape[-1] ** -0.5
    softcap = thinker.config.softcap
    capped = scaled if softcap is None else softcap * torch.tanh(scaled / softcap)
    row, sizes = weights[head, query], v[group].norm(dim=-1)  # (T,) each
    visible = row > 0
    total = capped[visible].exp().sum()
    rows = [
        [str(at), text, f"{scores[at]:.4f}", f"{scaled[at]:.4f}"]
        + ([f"{capped[at]:.4f}"] if softcap is not None else [])
        + (["yes", f"{capped[at].exp():.4f}", f"{row[at]:.4f}"] if visible[at] else ["no", "", "0"])
        + [f"{sizes[at]:.4f}", f"{row[at] * sizes[at]:.4f}"]
        for at, text in enumerate(prompt.labels)
    ]
    columns = ["key", "token", "q·k", f"÷ √{q.shape[-1]}", *(["capped"] if softcap is not None else []), "seen", "exp"]
    made = row @ v[group]  # (D,)
    after = f"Σ exp = {total:.4f}; the weighted sum of the values has the length {made.norm():.4f}, the head's output "
    after += f"{z[head, query].norm():.4f}"
    about = {"layer": layer, "head": f"{head}, of key head {group}", "query": f"{query} {prompt.labels[query]}"}
    data = {"layer": layer, "head": head, "query": query, "tokens": prompt.labels, "q": q[head, query].tolist()}
    data |= {"scores": scores.tolist(), "scaled": scaled.tolist(), "capped": capped.tolist(), "weights": row.tolist()}
    data |= {"values": v[group].tolist(), "output": made.tolist(), "head_output": z[head, query].tolist()}
    return Report(about, [*columns, "weight", "|v|", "weight·|v|"], rows, data, after=after)


def map_head(thinker: Thinker, prompt: Prompt, layer: int, head: int) -> Report:
    """Whom each token looks at in one head: its three largest weights."""
    name = f"blocks.{layer}.attention.weights"
    with torch.no_grad(), thinker.tap(name) as seen:
        thinker(prompt.tokens[None])
    weights = seen[name][0, head].cpu()  # (T, T)
    rows = []
    for query, text in enumerate(prompt.labels):
        top = weights[query].topk(min(3, query + 1))
        cells = [f"{value:.2f} {key} {prompt.labels[key]}" for value, key in zip(*(x.tolist() for x in top))]
        rows.append([str(query), text, *cells, *[""] * (3 - len(cells))])
    data = {"layer": layer, "head": head, "tokens": prompt.labels, "weights": weights.tolist()}
    title = f"layer {layer}, head {head}: rows are queries"
    panel = Panel(title, weights, prompt.numbered(), prompt.numbered(), top=1.0)
    about = {"layer": layer, "head": head}
    return Report(about, ["query", "token", "looks most at", "then", "then"], rows, data, [panel])


MEASURES = {
    "entropy": heads.entropy,
    "normalised": lambda weights: heads.entropy(weights, normalised=True),
    "distance": heads.mean_distance,
    "previous": heads.previous_token,
    "first": heads.first_token,
}
ON_REPEATS = {"duplicate": heads.duplicate_token, "induction": heads.induction}


@torch.no_grad()
def measure_heads(thinker: Thinker, prompt: Prompt | None, n: int = 24, batch: int = 8) -> Report:
    """The measures of analysis.heads for every head: on the prompt, or without one on random tokens repeated once.

    Induction and duplicate-token scores always are of the latter: n distinct tokens, `batch` times.
    """
    n = min(n, thinker.config.vocab_size, thinker.config.max_seq_len // 2)
    repeated = thinker.attention_weights(heads.repeated_tokens(thinker.config.vocab_size, n, batch).to(thinker.device))
    weights = repeated if prompt is None else thinker.attention_weights(prompt.tokens[None])  # (layers, B, H, T, T)
    found = {name: measure(weights).mean(dim=1).cpu() for name, measure in MEASURES.items()}  # (layers, H) each
    found |= {name: measure(repeated).mean(dim=1).cpu() for name, measure in ON_REPEATS.items()}
    layers, H = found["entropy"].shape
    rows = [
        [str(layer), str(head), *(f"{values[layer, head]:.3f}" for values in found.values())]
        for layer in range(layers)
        for head in range(H)
    ]
    data = {name: values.tolist() for name, values in found.items()}
    names = [f"layer {layer}" for layer in range(layers)], [f"head {head}" for head in range(H)]
    sizes = ("entropy", "distance")  # the others lie between 0 and 1
    panels = [Panel(name, x, *names, top=None if name in sizes else 1.0) for name, x in found.items()]
    text = "the prompt" if prompt is not None else f"{n} random tokens, repeated once"
    about = {"measured on": f"{text}; duplicate and induction on {n} random tokens, repeated once"}
    return Report(about, ["layer", "head", *found], rows, data, panels)


@torch.no_grad()
def show_flow(thinker: Thinker, prompt: Prompt, position: int) -> Report:
    """Rollout after each layer, and the maximum flow, from one position down to every token."""
    position %= len(prompt.tokens)
    weights = thinker.attention_weights(prompt.tokens[None])[:, 0].cpu()  # (layers, H, T, T)
    rolled = flow.rollout(weights)[:, position]  # (layers, T)
    flows = flow.max_flow(weights, position) if len(prompt.tokens) <= MOST_FLOWS else None
    rows = [
        [str(at), text, *(f"{x:.3f}" for x in rolled[:, at].tolist()), "" if flows is None else f"{flows[at]:.3f}"]
        for at, text in enumerate(prompt.labels)
    ]
    layers = [f"layer {layer}" for layer in range(len(rolled))]
    data = {"position": position, "tokens": prompt.labels, "rollout": rolled.tolist()}
    data |= {"max_flow": None if flows is None else flows.tolist()}
    panel = Panel(f"rollout from position {position}", rolled, layers, prompt.numbered())
    after = "" if flows is not None else f"no maximum flow: it takes hours beyond {MOST_FLOWS} tokens"
    about = {"position": f"{position} {prompt.labels[position]}"}
    return Report(about, ["key", "token", *layers, "max flow"], rows, data, [panel], after)


def choose_target(thinker: Thinker, prompt: Prompt, position: int) -> int:
    """The likeliest next token there."""
    with torch.no_grad():
        return int(thinker(prompt.tokens[None])[0, position].argmax())


def attribute(
    thinker: Thinker, tokenizer: Tokenizer, prompt: Prompt, target: int, against: int | None, position: int
) -> Report:
    """Of which tokens (integrated gradients) and of which parts (direct logit attribution) a prediction is made."""
    given, missed = attribution.integrated_gradients(thinker, prompt.tokens, target, against, position)
    parts = attribution.direct_logit_attribution(thinker, prompt.tokens, target, against, position)
    rows = [["token", text, f"{value:+.4f}"] for text, value in zip(prompt.numbered(), given.tolist())]
    layers = range(len(parts.mlps))
    named = [("embedding", parts.embedding)] + [(f"MLP {layer}", parts.mlps[layer].item()) for layer in layers]
    named += [(f"head {layer}.{h}", x) for layer in layers for h, x in enumerate(parts.heads[layer].tolist())]
    rows += [["part", name, f"{value:+.4f}"] for name, value in sorted(named, key=lambda part: -abs(part[1]))]
    what = label(tokenizer, target) + ("" if against is None else f" rather than {label(tokenizer, against)}")
    about = {"prediction": f"{what}, after position {position % len(prompt.labels)}", "logit": f"{parts.y:.4f}"}
    data = {"target": target, "against": against, "y": parts.y, "tokens": prompt.labels, "by_token": given.tolist()}
    data |= {"embedding": parts.embedding, "heads": parts.heads.tolist(), "mlps": parts.mlps.tolist(), "missed": missed}
    names = [f"layer {layer}" for layer in layers], [f"head {h}" for h in range(parts.heads.shape[1])]
    panels = [
        Panel("integrated gradients", given[None], ["by token"], prompt.numbered(), signed=True),
        Panel("direct logit attribution of heads", parts.heads, *names, signed=True),
    ]
    after = f"parts add up to {parts.sum():.4f}; tokens to the logit less that of empty embeddings, "
    after += f"missed by {abs(missed):.1e}"
    return Report(about, ["of", "what", "gives"], rows, data, panels, after)


def show_lens(thinker: Thinker, tokenizer: Tokenizer, prompt: Prompt, position: int) -> Report:
    """What the model would say after each layer, at one position: its three likeliest tokens there."""
    position %= len(prompt.tokens)
    shares = attribution.logit_lens(thinker, prompt.tokens, position)[:, 0].softmax(dim=-1).cpu()  # (layers + 1, V)
    top = shares.topk(min(3, shares.shape[1]), dim=-1)
    names = ["embedding", *(f"layer {layer}" for layer in range(len(shares) - 1))]
    rows = [
        [name, *(f"{share:.3f} {label(tokenizer, token)}" for share, token in zip(some.tolist(), tokens.tolist()))]
        for name, some, tokens in zip(names, *top)
    ]
    data = {"position": position, "top": [[[label(tokenizer, t), t, s] for s, t in zip(a.tolist(), b.tolist())]
                                          for a, b in zip(*top)]}  # fmt: skip
    about = {"position": f"{position} {prompt.labels[position]}"}
    return Report(about, ["after", "likeliest", "then", "then"][: len(rows[0])], rows, data)


def show_patch(
    thinker: Thinker, tokenizer: Tokenizer, clean: Prompt, corrupt: Prompt, target: int, against: int | None
) -> Report:
    """How much of a prediction comes back when one place of the stream is as in the clean prompt."""
    found = attribution.patch(thinker, clean.tokens, corrupt.tokens, target, against)
    names = list(found)
    values = torch.stack([found[name].cpu() for name in names])  # (layers + 1, T)
    pairs = [a if a == b else f"{a}/{b}" for a, b in zip(clean.labels, corrupt.labels)]
    rows = [[str(at), text, *(f"{x:.3f}" for x in values[:, at].tolist())] for at, text in enumerate(pairs)]
    what = label(tokenizer, target) + ("" if against is None else f" rather than {label(tokenizer, against)}")
    data = {"target": target, "against": against, "tokens": pairs, **{name: x.tolist() for name, x in found.items()}}
    columns = [f"{at} {text}" for at, text in enumerate(pairs)]
    panel = Panel(f"what brings back {what}", values, names, columns, signed=True)
    return Report({"prediction": what}, ["position", "token", *names], rows, data, [panel])
