"""What commands that sample print, beside the text."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from thinker.data.tokenizers.tokenizer import Tokenizer
from thinker.generation.engine import Generator
from thinker.generation.sequence import Completion, kept_when_sliding
from thinker.runtime.process.standard_streams import for_stream

if TYPE_CHECKING:
    from thinker.generation.scoring import Score

print_text = functools.partial(print, end="", flush=True)


def log(*lines: str) -> None:
    """Print lines to standard error."""
    for line in lines:
        print(for_stream(line, sys.stderr), file=sys.stderr, flush=True)


def describe_speed(
    generator: Generator, completions: list[Completion], seconds: float, first: float | None
) -> str:
    """A line about a batch that took `seconds`; its first text came after `first` seconds."""
    compile_seconds = generator.decoder.compile_seconds
    n_tokens = sum(len(completion.token_ids) for completion in completions)
    line = f"{n_tokens} tokens, {n_tokens / (seconds - compile_seconds):.0f} tokens/s"
    if first is not None:
        line += f", first text after {first:.2f} s"
    if compile_seconds:
        line += f", after {compile_seconds:.1f} s of compiling"
    if generator.drafting is not None:
        drafted = sum(completion.drafted for completion in completions)
        accepted = sum(completion.accepted for completion in completions)
        line += f"; {accepted} of {drafted} drafted tokens accepted"
    report = generator.decoder.report()
    if report:
        line += f"; {report}"
    return line


def logprob_lines(tokenizer: Tokenizer, tokens: Completion | Score) -> Iterator[str]:
    """A line per token: its log-probability in nats, its text and the most likely tokens."""

    def quote(token: int) -> str:
        text = tokenizer.decode([token]) or f"<{token}>"
        return json.dumps(text, ensure_ascii=False)

    for index, token in enumerate(tokens.token_ids):
        line = f"{tokens.logprobs[index]:9.4f}  {quote(token):<16}"
        if tokens.top_logprobs:
            top = tokens.top_logprobs[index]
            line += " " + "  ".join(f"{quote(other)} {top[other]:.3f}" for other in top)
        yield line.rstrip()


def describe_context_end(
    generator: Generator, completions: list[Completion], max_new_tokens: int
) -> dict[str, str]:
    """What happened at the end of the context: lines to print once, by name."""
    context_len = generator.context_len
    lines = {}
    if any(completion.n_slides for completion in completions):
        n_kept = kept_when_sliding(context_len)
        kept = f"the text continues from its newest {n_kept} (see --no-slide)"
        lines["slid"] = f"the context of {context_len} tokens is full: {kept}"
    for completion in completions:
        n_new = len(completion.token_ids)
        is_cut = completion.finish_reason == "length" and n_new < max_new_tokens
        if is_cut and completion.prompt_tokens + n_new > context_len:
            hint = "; use --window N for longer texts" if generator.supports_window else ""
            lines["ended"] = f"stopped at the end of the context ({context_len} tokens){hint}"
    evicted = generator.caches.describe_evicted(completions)
    if evicted:
        lines["evicted"] = evicted
    return lines


def describe_unmet(completions: list[Completion]) -> list[str]:
    """A line or none: how many texts were cut before they matched a JSON schema or regex."""
    n_unmet = sum(completion.constraint_met is False for completion in completions)
    if n_unmet == 0:
        return []
    cut = "the text was" if len(completions) == 1 else f"{n_unmet} of {len(completions)} texts were"
    hint = "use a higher --max-new-tokens, or a schema or regex with shorter texts"
    return [f"{cut} cut before the JSON schema or regex was complete; {hint}"]
