"""inspect(): what a model computes on one prompt, as a report."""

from __future__ import annotations

import inspect as signatures
from collections.abc import Callable
from typing import Any

from thinker.data.tokenizers.tokenizer import Tokenizer
from thinker.interpretability import head_reports, prompt_reports
from thinker.interpretability.explain import explain
from thinker.interpretability.reports import Prompt, Report
from thinker.model import Thinker
from thinker.runtime.errors import UserError, did_you_mean


def inspect(
    model: Thinker, tokenizer: Tokenizer, report: str, prompt: str, **options: Any
) -> Report:
    """What a model computes on one prompt, as `thinker inspect`.

    Args:
        report: and its options, which have the defaults of the flags of that name:
            explain: one attention row step by step (layer, head, query).
            map: what each token attends to in one head (layer, head; by default the head that
                the likeliest next token needs most).
            heads: scores of all heads.
            flow: attention from a position to the tokens (position).
            attribute: a prediction by tokens, heads and MLPs (target, contrast_token, position).
            lens: what the model would predict after each layer (position).
            patch: which activations restore a prediction in another prompt (corrupt, target,
                contrast_token).
        prompt: a text of 2 to max_seq_len tokens.

    Returns a Report: print(report.table()), or take the values from report.data. Raises UserError.
    """
    if report not in REPORTS:
        hint = did_you_mean(report, REPORTS) or f"; use one of {', '.join(REPORTS)}"
        raise UserError(f"there is no report {report}{hint}")
    function = REPORTS[report]
    names = list(signatures.signature(function).parameters)[3:]
    for name in options:
        if name not in names:
            allowed = ", ".join(names) or "none"
            raise UserError(f"{report} has no option {name}; its options: {allowed}")
    return function(model, tokenizer, Prompt.from_text(model, tokenizer, prompt), **options)


def report_row(
    model: Thinker,
    tokenizer: Tokenizer,
    prompt: Prompt,
    layer: int = 0,
    head: int = 0,
    query: int = -1,
) -> Report:
    """One attention row, step by step."""
    check_head(model, layer, head)
    check_index("query", query, len(prompt.tokens), from_end=True)
    return explain(model, prompt, layer, head, query)


def report_map(
    model: Thinker,
    tokenizer: Tokenizer,
    prompt: Prompt,
    layer: int | None = None,
    head: int | None = None,
) -> Report:
    """What each token attends to in one head; by default the one that the likeliest next token
    needs most."""
    if layer is not None and head is not None:
        check_head(model, layer, head)
        return prompt_reports.report_attention_map(model, prompt, layer, head)
    sizes = [block.attention.n_heads for block in model.blocks]
    if layer is not None:
        check_index("layer", layer, len(sizes))
    if head is not None:
        check_index("head", head, max(sizes))
    found = prompt_reports.choose_head(model, prompt, layer, head)
    reason = found.describe(tokenizer)
    return prompt_reports.report_attention_map(model, prompt, found.layer, found.head, reason)


def report_heads(model: Thinker, tokenizer: Tokenizer, prompt: Prompt) -> Report:
    """Scores of all heads; induction on random tokens of the whole vocabulary."""
    random = head_reports.random_repeats(model, None)
    return head_reports.report_heads(model, prompt, random, "the whole vocabulary")


def report_flow(model: Thinker, tokenizer: Tokenizer, prompt: Prompt, position: int = -1) -> Report:
    """Attention from a position to the tokens."""
    check_index("position", position, len(prompt.tokens), from_end=True)
    return prompt_reports.report_flow(model, prompt, position)


def report_attribution(
    model: Thinker,
    tokenizer: Tokenizer,
    prompt: Prompt,
    target: str | None = None,
    contrast_token: str | None = None,
    position: int = -1,
) -> Report:
    """A prediction by tokens, heads and MLPs."""
    check_index("position", position, len(prompt.tokens), from_end=True)
    tokens = encode_targets(tokenizer, target, contrast_token)
    return prompt_reports.report_attribution(model, tokenizer, prompt, *tokens, position)


def report_lens(model: Thinker, tokenizer: Tokenizer, prompt: Prompt, position: int = -1) -> Report:
    """What the model would predict after each layer."""
    check_index("position", position, len(prompt.tokens), from_end=True)
    return prompt_reports.report_logit_lens(model, tokenizer, prompt, position)


def report_patching(
    model: Thinker,
    tokenizer: Tokenizer,
    prompt: Prompt,
    corrupt: str,
    target: str | None = None,
    contrast_token: str | None = None,
) -> Report:
    """Which activations restore a prediction in another prompt."""
    tokens = encode_targets(tokenizer, target, contrast_token)
    other = Prompt.from_text(model, tokenizer, corrupt)
    return prompt_reports.report_patching(model, tokenizer, prompt, other, *tokens)


REPORTS: dict[str, Callable[..., Report]] = {
    "explain": report_row,
    "map": report_map,
    "heads": report_heads,
    "flow": report_flow,
    "attribute": report_attribution,
    "lens": report_lens,
    "patch": report_patching,
}


def check_head(model: Thinker, layer: int, head: int) -> None:
    """Raise UserError if the model has no such layer or head."""
    check_index("layer", layer, len(model.blocks))
    check_index("head", head, model.blocks[layer].attention.n_heads)


def check_index(name: str, index: int, size: int, from_end: bool = False) -> None:
    """Raise UserError if the index of a layer, head or position is out of range."""
    lowest = -size if from_end else 0
    if not lowest <= index < size:
        raise UserError(f"--{name} is {index}; use {lowest} to {size - 1}")


def encode_targets(
    tokenizer: Tokenizer, target: str | None, contrast_token: str | None
) -> tuple[int | None, int | None]:
    """The ids of the predicted token and of the one that it is compared with. Raises UserError
    unless each is one token."""
    return (
        _encode_token(tokenizer, "target", target),
        _encode_token(tokenizer, "contrast-token", contrast_token),
    )


def _encode_token(tokenizer: Tokenizer, name: str, text: str | None) -> int | None:
    if text is None:
        return None
    ids = tokenizer.encode(text, allow_special=True)
    if len(ids) != 1:
        parts = " ".join(repr(tokenizer.decode([i])) for i in ids)
        raise UserError(
            f"--{name} {text!r} is {len(ids)} tokens ({parts}); give a single token, such as ' cat'"
        )
    return ids[0]
