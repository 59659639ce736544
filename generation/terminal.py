"""Terminal output of generate.py: samples and scores."""

import functools
import json
import sys
import time
from collections.abc import Iterator

from thinker.features.structured_output.constraints import describe_unmet
from thinker.generation.engine import Generator
from thinker.generation.mixed_bits import describe_bits
from thinker.generation.sampler import SamplingParams
from thinker.generation.sequence import Completion, Score
from thinker.generation.sliding import describe_context_end
from thinker.runtime.checks import finite_json
from thinker.runtime.standard_streams import for_stream

print_text = functools.partial(print, end="", flush=True)


def log(*lines: str) -> None:
    """Print lines to standard error."""
    for line in lines:
        print(for_stream(line, sys.stderr), file=sys.stderr, flush=True)


def print_samples(
    generator: Generator,
    prompt: str,
    tokens: list[int],
    params: SamplingParams,
    n_samples: int,
    show_logprobs: bool,
) -> None:
    """Generate a batch of samples: stream the first, then print the others, separated by ---."""
    completions = [Completion(prompt) for _ in range(n_samples)]
    start, first = time.perf_counter(), ""
    print_text(prompt)
    for index, piece in generator.stream_batch(completions, params, [tokens] * n_samples):
        first = first or f", first text after {time.perf_counter() - start:.2f} s"
        if index == 0:
            print_text(piece)
    compile_seconds = getattr(generator.decode_model, "compile_seconds", 0.0)
    seconds = time.perf_counter() - start - compile_seconds
    for completion in completions[1:]:
        print_text(f"\n\n---\n\n{prompt}{completion.text}")
    print_text("\n")
    for completion in completions if show_logprobs else []:
        log(*logprob_lines(generator, completion))
    n_tokens = sum(len(completion.token_ids) for completion in completions)
    text = f"{n_tokens} tokens, {n_tokens / seconds:.0f} tokens/s{first}"
    if compile_seconds:
        text += f", after {compile_seconds:.1f} s of compiling"
    if generator.speculate:
        accepted = sum(completion.accepted for completion in completions)
        text += f"; {accepted} of {sum(completion.drafted for completion in completions)} drafted tokens accepted"
    if generator.early_exit is not None:
        text += f"; {generator.decode_model.mean_layers or 0:.2f} of {generator.config.n_layers} layers per token"
    log(text)
    log(
        *describe_context_end(generator, completions, params.max_new_tokens).values(),
        *describe_unmet(completions),
    )


def logprob_lines(generator: Generator, tokens: Completion | Score) -> Iterator[str]:
    """Format a line per token: its log-probability in nats, its text and the most likely tokens."""

    def quote(token: int) -> str:
        return json.dumps(generator.tokenizer.decode([token]) or f"<{token}>", ensure_ascii=False)

    top_logprobs = tokens.top_logprobs or [{} for _ in tokens.token_ids]
    for token, logprob, top in zip(tokens.token_ids, tokens.logprobs, top_logprobs):
        others = "  ".join(f"{quote(other)} {value:.3f}" for other, value in top.items())
        yield f"{logprob:9.4f}  {quote(token):<16} {others}".rstrip()


def print_score(
    generator: Generator, score: Score, exact: Score | None, as_json: bool, show_logprobs: bool
) -> None:
    """Print the likelihood of a text. `exact`: the score in fp32, for comparison with fewer bits."""
    n_tokens, bits = len(score.token_ids), score.bits_per_byte
    context = generator.context_len
    windows = (
        f", in windows of {context} tokens, each overlapping the last by half"
        if n_tokens > context
        else ""
    )
    log(f"counted: all tokens, without an end-of-text token{windows}")
    numbers = {"tokens": n_tokens, "bytes": score.n_bytes, "nats": score.nats}
    numbers |= {"nats_per_token": score.nats / max(n_tokens, 1), "bits_per_byte": bits}
    if exact is not None:
        numbers["bits_per_byte_fp32"] = exact.bits_per_byte
        numbers["cost_of_quantization"] = (
            bits / exact.bits_per_byte - 1 if exact.bits_per_byte else 0.0
        )
    if as_json:
        tokens = {
            "token_ids": score.token_ids,
            "logprobs": score.logprobs,
            "top_logprobs": score.top_logprobs,
        }
        print(finite_json({**numbers, **tokens}))
        return
    for line in logprob_lines(generator, score) if show_logprobs else ():
        print(line)
    print(
        "{tokens} tokens, {bytes} bytes: {nats:.4f} nats in total, {nats_per_token:.4f} nats per token, "
        "{bits_per_byte:.4f} bits per byte".format(**numbers)
    )
    if exact is not None:
        cost = f"{describe_bits(generator.bits, generator.cache_bits)}: {100 * numbers['cost_of_quantization']:+.3f}%"
        print(f"in fp32: {exact.bits_per_byte:.4f} bits per byte; with {cost}")
