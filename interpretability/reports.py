"""What scripts/inspect_model.py shows: each report is a table to read, numbers for JSON, and panels to draw."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from thinker.data.tokenizer import Tokenizer
from thinker.interpretability import attribution, flow, heads
from thinker.model import Thinker
from thinker.runtime.errors import UserError

AXES = "looked at (key)", "who looks (query)"
EMPTY = "an empty text"  # of beginnings (or of the mean embedding) only
NO_GRADIENT = "who looks at whom depends on the tokens' ids here, and those have no gradients"
LENS_COLUMNS = 16  # positions of its picture, the last before the one that is asked for
Measure = Callable[[Tensor], Tensor]  # (B, H, T, T) -> (B, H, ...)
MOST_FLOWS = 64  # positions, each of which takes a maximum flow from every other


@dataclass(frozen=True)
class Panel:
    """A matrix to be drawn: values (rows, columns), nan where there is nothing, and labels, spread evenly if fewer.

    "text": tokens in a row, colored; "table": every cell with what it says; "lines": a line for each column.
    """

    title: str
    values: Tensor
    rows: list[str]
    columns: list[str]
    signed: bool = False  # colors from below zero to above it
    top: float | None = None  # where colors end; the largest value unless given
    style: Literal["heatmap", "text", "table", "lines"] = "heatmap"
    cells: list[list[str]] | None = None  # of a table
    row: int | None = None  # one to be framed
    axes: tuple[str, str] = ("", "")  # what columns and rows are


@dataclass(frozen=True)
class Report:
    """`rows` of cells under `columns`, after `about`, which is said first; `data`: all of it, unrounded."""

    about: dict[str, Any]
    columns: list[str]
    rows: list[list[str]]
    data: dict[str, Any]
    panels: list[Panel] = field(default_factory=list)
    after: str = ""
    across: int = 1  # panels beside each other in a picture

    def table(self) -> str:
        """As text: columns as wide as their cells."""
        lines = [f"{name:>12}  {value}" for name, value in self.about.items()]
        cells = [self.columns, *self.rows]
        widths = [max(len(row[at]) for row in cells) for at in range(len(self.columns))]
        words = [any(row[at][:1].strip("+-.0123456789") for row in self.rows) for at in range(len(widths))]
        place = [str.ljust if is_words else str.rjust for is_words in words]
        lines.append("")
        for row in cells:
            lines.append("  ".join(put(cell, width) for put, cell, width in zip(place, row, widths)).rstrip())
        return "\n".join([*lines, "", self.after] if self.after else lines)


@dataclass(frozen=True)
class Prompt:
    """A text as the model reads it: ids (T,), and what each of them says."""

    tokens: Tensor
    labels: list[str]

    @classmethod
    def read(cls, model: Thinker, tokenizer: Tokenizer, text: str) -> Prompt:
        """Begun as all its texts. Raises UserError where there are fewer than two tokens, or more than the context."""
        ids = [*tokenizer.bos_prefix, *tokenizer.encode(text)]
        if not 2 <= len(ids) <= model.config.max_seq_len:
            begun = " with the one that begins texts" if tokenizer.bos_prefix else ""
            longest = model.config.max_seq_len
            raise UserError(f"the prompt has {len(ids)} token(s){begun}; there must be 2 to {longest}")
        return cls(torch.tensor(ids, device=model.device), [label(tokenizer, i) for i in ids])

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


def report_attention_map(model: Thinker, prompt: Prompt, layer: int, head: int) -> Report:
    """Whom each token looks at in one head: its three largest weights."""
    name = f"blocks.{layer}.attention.weights"
    with torch.no_grad(), model.record(name) as seen:
        model(prompt.tokens[None])
    weights = seen[name][0, head].cpu()  # (T, T)
    rows = []
    for query, text in enumerate(prompt.labels):
        top = weights[query].topk(min(3, query + 1))
        pairs = zip(*(x.tolist() for x in top))
        cells = [f"{value:.2f} {prompt.labels[key]} ({key})" for value, key in pairs if value > 0]
        rows.append([str(query), text, *cells, *[""] * (3 - len(cells))])
    data = {"layer": layer, "head": head, "tokens": prompt.labels, "weights": weights.tolist()}
    title = f"whom each token looks at, layer {layer}, head {head}"
    shown = weights.masked_fill(weights == 0, torch.nan)
    panel = Panel(title, shown, prompt.numbered(), prompt.numbered(), top=1.0, axes=AXES)
    about = {"layer": layer, "head": head}
    return Report(about, ["query", "token", "looks most at", "then", "then"], rows, data, [panel])


MEASURES = {
    "entropy": heads.entropy,
    "normalised": lambda weights: heads.entropy(weights, normalised=True),
    "distance": heads.mean_distance,
    "previous": heads.previous_token,
    "first": heads.first_token,
}
TITLES = {
    "entropy": "entropy (nats)", "normalised": "entropy, of the largest possible", "distance": "mean distance (tokens)",
    "previous": "share on the previous token", "first": "share on the first token",
    "duplicate": "duplicate-token score", "induction": "induction score",
}  # fmt: skip
ON_REPEATS = {"duplicate": heads.duplicate_token, "induction": heads.induction}


@torch.no_grad()
def measured(model: Thinker, tokens: Tensor, measures: Mapping[str, Measure]) -> dict[str, list[Tensor]]:
    """Of each layer what the measures make of its weights, a mean over texts: (B, T) -> (H, ...) each.

    In one pass, which holds one layer's weights at a time.
    """
    found: dict[str, list[Tensor]] = {name: [] for name in measures}

    def measure(weights: Tensor) -> Tensor:
        for name, of in measures.items():
            found[name].append(of(weights).mean(dim=0).cpu())
        return weights

    with model.patch({"blocks.*.attention.weights": measure}):
        model(tokens)
    return found


def random_repeats(model: Thinker, ids: Tensor | None = None, n: int = 24, batch: int = 8) -> Tensor:
    """Tokens for induction scores: n distinct ones, repeated once, or as many as the model can take; (batch, 2n).

    ids: those to draw from, such as occur in a text; all of the vocabulary unless given.
    """
    ids = torch.arange(model.config.vocab_size) if ids is None else ids
    n = min(n, len(ids), model.config.max_seq_len // 2)
    return heads.repeated_random_tokens(ids, n, batch).to(model.device)


def scores(model: Thinker, tokens: Tensor, random: Tensor) -> dict[str, Tensor]:
    """All measures of tokens (B, T), (layers, H) each; induction and duplicate-token scores of random_repeats()."""
    found = measured(model, tokens, MEASURES) | measured(model, random, ON_REPEATS)
    return {name: pad_sequence(x, batch_first=True, padding_value=torch.nan) for name, x in found.items()}


def head_labels(values: Tensor) -> tuple[list[str], list[str]]:
    """Labels of (layers, H)."""
    return [f"layer {layer}" for layer in range(len(values))], [f"head {head}" for head in range(values.shape[1])]


def all_heads(values: Tensor) -> list[tuple[int, int]]:
    """Every (layer, head) that there is: nan where there is none; (layers, H)."""
    return [(layer, head) for layer, head in (~values.isnan()).nonzero().tolist()]


def numbers(values: Tensor) -> Any:
    """As lists for JSON, which knows no nan."""
    flat = [None if math.isnan(x) else x for x in values.flatten().tolist()]
    for size in reversed(values.shape[1:]):
        flat = [flat[at : at + size] for at in range(0, len(flat), size)]
    return flat


@torch.no_grad()
def report_heads(model: Thinker, prompt: Prompt | None, random: Tensor, origin: str) -> Report:
    """The measures of analysis.heads for every head, on the prompt, or without one on random tokens repeated once.

    random: random_repeats(), and of what they were drawn.
    """
    tokens = random if prompt is None else prompt.tokens[None]
    found = scores(model, tokens, random)
    apart = measured(model, tokens, {"apart": heads.pairwise_js_divergence})["apart"]  # (H, H) each
    rows = []
    for layer, head in all_heads(found["entropy"]):
        others = [(x, other) for other, x in enumerate(apart[layer][head].tolist()) if other != head]
        like = "{1} ({0:.3f})".format(*min(others)) if others else ""
        rows.append([str(layer), str(head), *(f"{values[layer, head]:.3f}" for values in found.values()), like])
    names, sizes = head_labels(found["entropy"]), ("entropy", "distance")  # the others lie between 0 and 1
    panels = [Panel(TITLES[name], x, *names, top=None if name in sizes else 1.0) for name, x in found.items()]
    panels.insert(0, Panel("whom every head looks at", _tiles(model, tokens[:1]), *names))
    what = f"{random.shape[1] // 2} random tokens of {origin}, repeated once"
    about = {"measured on": what if prompt is None else f"the prompt; duplicate and induction on {what}"}
    about["most like"] = (
        "the head of the layer that looks most alike, and how far apart they are (Jensen–Shannon, nats)"
    )
    data = {name: numbers(values) for name, values in found.items()} | {"redundancy": [x.tolist() for x in apart]}
    after = f"a head that looks everywhere alike has duplicate and induction scores of {_alike(random):.3f}"
    return Report(about, ["layer", "head", *found, "most like"], rows, data, panels, after, across=2)


def _alike(random: Tensor) -> float:
    """The induction score of uniform attention."""
    T = random.shape[1]
    return sum(1 / (i + 1) for i in range(T // 2, T)) / (T // 2)


def _tiles(model: Thinker, tokens: Tensor, most: int = 64) -> Tensor:
    """The maps of all heads side by side, with nan between them; of long texts the largest weight of each square.

    Each map is divided by its largest weight but for that on the first token, where many heads look at all times.
    """

    def shrunk(weights: Tensor) -> Tensor:
        maps = F.max_pool2d(weights.float(), -(-weights.shape[-1] // most), ceil_mode=True)  # (1, H, S, S)
        return (maps / maps[..., 1:].amax(dim=(2, 3), keepdim=True).clamp_min(1e-9)).clamp_max(1)

    maps = measured(model, tokens, {"maps": shrunk})["maps"]
    every = pad_sequence(maps, batch_first=True, padding_value=torch.nan)  # (layers, H, S, S)
    gap = 1 + every.shape[-1] // 16
    every = F.pad(every, (0, gap, 0, gap), value=torch.nan)
    return every.transpose(1, 2).flatten(2).flatten(0, 1)[:-gap, :-gap]


@torch.no_grad()
def report_flow(model: Thinker, prompt: Prompt, position: int) -> Report:
    """Rollout after each layer, and the maximum flow, from one position down to every token."""
    position %= len(prompt.tokens)
    weights = model.attention_weights(prompt.tokens[None])[:, 0].cpu()  # (layers, H, T, T)
    rolled = flow.rollout(weights)[:, position]  # (layers, T)
    flows = flow.max_flow(weights, position) if len(prompt.tokens) <= MOST_FLOWS else None
    rows = [
        [str(at), text, *(f"{x:.3f}" for x in rolled[:, at].tolist()), "" if flows is None else f"{flows[at]:.3f}"]
        for at, text in enumerate(prompt.labels)
    ]
    layers = [f"layer {layer}" for layer in range(len(rolled))]
    data = {"position": position, "tokens": prompt.labels, "rollout": rolled.tolist()}
    data |= {"max_flow": None if flows is None else flows.tolist()}
    panel = Panel(f"rollout: how much of each token is in position {position}", rolled, layers, prompt.numbered())
    after = "after each layer the share of the token in that position (rollout); max flow: the most that could arrive"
    after += "" if flows is not None else f" (left out: it takes long beyond {MOST_FLOWS} tokens)"
    about = {"position": f"{position} {prompt.labels[position]}"}
    return Report(about, ["key", "token", *layers, "max flow"], rows, data, [panel], after)


def likeliest_next_token(model: Thinker, prompt: Prompt, position: int) -> int:
    """The likeliest next token there."""
    with torch.no_grad():
        return int(model(prompt.tokens[None])[0, position].argmax())


def by_tokens(
    model: Thinker, tokenizer: Tokenizer, prompt: Prompt, target: int, contrast_token: int | None, position: int
) -> tuple[Tensor, float, float] | None:
    """attribution.integrated_gradients() against a text of nothing but the token that begins texts, if there is one.

    None where patterns ask for the tokens' ids, and so embeddings alone cannot be read.
    """
    if any(pattern.by_token for pattern in model.config.patterns):
        return None
    start = tokenizer.bos_prefix[0] if tokenizer.bos_prefix else None
    return attribution.integrated_gradients(model, prompt.tokens, target, contrast_token, position, start)


def attribute(
    model: Thinker, tokenizer: Tokenizer, prompt: Prompt, target: int, contrast_token: int | None, position: int
) -> Report:
    """Of which tokens (integrated gradients) and of which parts (direct logit attribution) a prediction is made."""
    of_tokens = by_tokens(model, tokenizer, prompt, target, contrast_token, position)
    parts = attribution.direct_logit_attribution(model, prompt.tokens, target, contrast_token, position)
    rows, layers = [], range(len(parts.mlps))
    named = [("embedding", parts.embedding)] + [(f"MLP {layer}", parts.mlps[layer].item()) for layer in layers]
    named += [(f"head {layer}.{h}", x) for layer, h in all_heads(parts.heads) for x in [parts.heads[layer, h].item()]]
    rows += [["part", name, f"{value:+.4f}"] for name, value in sorted(named, key=lambda part: -abs(part[1]))]
    what = label(tokenizer, target) + (
        "" if contrast_token is None else f" rather than {label(tokenizer, contrast_token)}"
    )
    about = {"prediction": f"{what}, after position {position % len(prompt.labels)}", "logit": f"{parts.y:.4f}"}
    data = {
        "prediction": what,
        "target": target,
        "contrast_token": contrast_token,
        "y": parts.y,
        "tokens": prompt.labels,
    }
    data |= {"embedding": parts.embedding, "heads": numbers(parts.heads), "mlps": parts.mlps.tolist()}
    panels = [Panel("what the heads give (direct logit attribution)", parts.heads, *head_labels(parts.heads), True)]
    after = f"parts add up to {parts.sum():.4f}; "
    if of_tokens is None:
        after += f"nothing is said of tokens: {NO_GRADIENT}"
        return Report(about, ["of", "what", "gives"], rows, data, panels, after)
    given, empty, missed = of_tokens
    data |= {"by_token": given.tolist(), "missed": missed, "y_of_empty_text": empty}
    rows = [["token", text, f"{x:+.4f}"] for text, x in zip(prompt.numbered(), given.tolist())] + rows
    panels.insert(
        0, Panel(f"what the tokens give to {what}", given[None], [""], prompt.labels, signed=True, style="text")
    )
    after += f"tokens, with the {empty:.4f} of {EMPTY}, to {parts.y + missed:.4f}"
    if abs(missed) > 0.05 * max(1, abs(parts.y - empty)):
        after += ": the integral is not reached, read them with care"
    return Report(about, ["of", "what", "gives"], rows, data, panels, after)


def report_logit_lens(model: Thinker, tokenizer: Tokenizer, prompt: Prompt, position: int) -> Report:
    """What the model would say after each layer, at one position: its three likeliest tokens there."""
    position %= len(prompt.tokens)
    before = slice(max(0, position - LENS_COLUMNS + 1), position + 1)
    n = len(range(*before.indices(len(prompt.tokens))))
    every = attribution.logit_lens(model, prompt.tokens, before).softmax(dim=-1).cpu()  # (layers + 1, positions, V)
    top = every[:, -1].topk(min(3, every.shape[-1]), dim=-1)
    names = ["embedding", *(f"layer {layer}" for layer in range(len(every) - 1))]
    rows = [
        [name, *(f"{share:.3f} {label(tokenizer, token)}" for share, token in zip(some.tolist(), tokens.tolist()))]
        for name, some, tokens in zip(names, *top)
    ]
    said = [[{"token": label(tokenizer, t), "id": t, "probability": p} for p, t in zip(some.tolist(), tokens.tolist())]
            for some, tokens in zip(*top)]  # fmt: skip
    about = {"position": f"{position} {prompt.labels[position]}"}
    shares, best = every.max(dim=-1)  # (layers + 1, positions) each
    cells = [[label(tokenizer, token) for token in row] for row in best.tolist()]
    data = {"position": position, "after": names, "likeliest": said, "tokens": prompt.labels[before], "said": cells}
    data["probability"] = shares.tolist()
    title = "what the model would say next after each layer, and how surely"
    title += "" if n == len(prompt.tokens) else f": the last {n} of {position + 1} positions"
    panel = Panel(title, shares, names, prompt.numbered()[before], top=1.0, style="table", cells=cells)
    return Report(about, ["after", "likeliest", "then", "then"][: len(rows[0])], rows, data, [panel])


def report_patching(
    model: Thinker, tokenizer: Tokenizer, clean: Prompt, corrupt: Prompt, target: int, contrast_token: int | None
) -> Report:
    """How much of a prediction comes back when one place of the stream is as in the clean prompt."""
    found = attribution.patch(model, clean.tokens, corrupt.tokens, target, contrast_token)
    values = torch.stack([x.cpu() for x in found.values()])  # (layers + 1, T)
    names = ["embedding", *(f"layer {layer}" for layer in range(len(values) - 1))]
    pairs = [a if a == b else f"{a}/{b}" for a, b in zip(clean.labels, corrupt.labels)]
    rows = [[str(at), text, *(f"{x:.3f}" for x in values[:, at].tolist())] for at, text in enumerate(pairs)]
    what = label(tokenizer, target) + (
        "" if contrast_token is None else f" rather than {label(tokenizer, contrast_token)}"
    )
    data = {
        "target": target,
        "contrast_token": contrast_token,
        "tokens": pairs,
        **{name: x.tolist() for name, x in found.items()},
    }
    columns = [f"{at} {text}" for at, text in enumerate(pairs)]
    panel = Panel(f"what brings back {what}", values, names, columns, signed=True)
    about = {"prediction": what, "clean": "".join(clean.labels), "corrupt": "".join(corrupt.labels)}
    after = "0: that place brings nothing of the clean prompt's prediction back, 1: all of it"
    return Report(about, ["position", "token", *names], rows, data, [panel], after)
