"""Prints the likelihood of a text."""

from collections.abc import Callable

from thinker.data.tokenizers.text_bytes import loses_text, warn_of_lost_text
from thinker.generation.command.terminal import log, logprob_lines
from thinker.generation.engine import Generator
from thinker.generation.mixed_bits import describe_bits
from thinker.generation.scoring import Score
from thinker.runtime.checks import finite_json


def report_score(
    generator: Generator,
    new_exact: Callable[[], Generator] | None,
    text: str,
    n_top: int | None,
    as_json: bool,
) -> None:
    """Score a text and print the score.

    `new_exact` makes a Generator in fp32, to report what fewer bits cost. `n_top`: how many of the
    most likely tokens to print for each token; None: print no tokens.
    """
    tokenizer = generator.tokenizer
    warn_of_lost_text(loses_text(tokenizer, text, tokenizer.encode(text)), 1)
    exact = None
    if new_exact is not None:
        exact = new_exact().score(text)
    score = generator.score(text, n_top or 0, progress=True)
    print_score(generator, score, exact, as_json, n_top is not None)


def print_score(
    generator: Generator, score: Score, exact: Score | None, as_json: bool, show_logprobs: bool
) -> None:
    """Print a score. `exact`: the score in fp32, for comparison with fewer bits."""
    n_tokens = len(score.token_ids)
    windows = ""
    if n_tokens > generator.context_len:
        size = f"{generator.context_len} tokens"
        windows = f", in windows of {size}, each overlapping the last by half"
    log(f"counted: all tokens, without an end-of-text token{windows}")
    numbers = _numbers(score, exact)
    if as_json:
        tokens = {
            "token_ids": score.token_ids,
            "logprobs": score.logprobs,
            "top_logprobs": score.top_logprobs,
        }
        print(finite_json(numbers | tokens))
        return
    if show_logprobs:
        for line in logprob_lines(generator.tokenizer, score):
            print(line)
    size = f"{n_tokens} tokens, {score.n_bytes} bytes"
    per_token = f"{numbers['nats_per_token']:.4f} nats per token"
    per_byte = f"{score.bits_per_byte:.4f} bits per byte"
    print(f"{size}: {score.nats:.4f} nats in total, {per_token}, {per_byte}")
    if exact is not None:
        bits = describe_bits(generator.bits, generator.caches.bits)
        cost = f"{100 * numbers['cost_of_quantization']:+.3f}%"
        print(f"in fp32: {exact.bits_per_byte:.4f} bits per byte; with {bits}: {cost}")


def _numbers(score: Score, exact: Score | None) -> dict[str, float]:
    """What --json prints, without the tokens."""
    n_tokens = len(score.token_ids)
    numbers = {
        "tokens": n_tokens,
        "bytes": score.n_bytes,
        "nats": score.nats,
        "nats_per_token": score.nats / max(n_tokens, 1),
        "bits_per_byte": score.bits_per_byte,
    }
    if exact is not None:
        cost = 0.0
        if exact.bits_per_byte:
            cost = score.bits_per_byte / exact.bits_per_byte - 1
        numbers["bits_per_byte_fp32"] = exact.bits_per_byte
        numbers["cost_of_quantization"] = cost
    return numbers
