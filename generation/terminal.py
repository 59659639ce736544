"""What generate.py prints: samples as they are generated, scores, and an interactive session."""

import contextlib
import dataclasses
import functools
import json
import signal
import sys
import time
from collections.abc import Iterator

from thinker.generation.conversation import Conversation
from thinker.generation.engine import Generator
from thinker.generation.sampler import SamplingParams
from thinker.generation.sequence import Completion, Score
from thinker.generation.sliding import describe_context_end
from thinker.runtime.errors import UserError, did_you_mean
from thinker.runtime.finite import finite_json
from thinker.runtime.terminal_text import for_stream

HELP = r"""\n in what you type is a line break. Ctrl-C ends the model's turn and keeps what it wrote.
/undo             remove the last turn
/reset            start a new text
/show             print the text so far
/set NAME VALUE   such as /set temperature 0.5; /set alone lists all settings
/quit             leave (so does Ctrl-D); start a line with // to write a text that starts with /"""
print_text = functools.partial(print, end="", flush=True)
COMMANDS = ("/undo", "/reset", "/show", "/set", "/help", "/quit")


def log(*lines: str) -> None:
    """Print lines to standard error."""
    for line in lines:
        print(for_stream(line, sys.stderr), file=sys.stderr, flush=True)


def print_samples(
    generator: Generator, prompt: str, tokens: list[int], params: SamplingParams, n_samples: int, show_logprobs: bool
) -> None:
    """Generate samples after `tokens` together: stream the first one, print the others after it, separated by ---."""
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
        text += f", after compiling for {compile_seconds:.1f} s"
    if generator.speculate:
        accepted = sum(completion.accepted for completion in completions)
        text += f"; {accepted} of {sum(completion.drafted for completion in completions)} drafted tokens accepted"
    log(text)
    log(*describe_context_end(generator, completions, params.max_new_tokens).values())


def logprob_lines(generator: Generator, tokens: Completion | Score) -> Iterator[str]:
    """One line per token: its log-probability in nats, its text, and the likeliest tokens at its position."""

    def quote(token: int) -> str:
        return json.dumps(generator.tokenizer.decode([token]) or f"<{token}>", ensure_ascii=False)

    top_logprobs = tokens.top_logprobs or [{} for _ in tokens.token_ids]
    for token, logprob, top in zip(tokens.token_ids, tokens.logprobs, top_logprobs):
        others = "  ".join(f"{quote(other)} {value:.3f}" for other, value in top.items())
        yield f"{logprob:9.4f}  {quote(token):<16} {others}".rstrip()


def print_score(generator: Generator, score: Score, exact: Score | None, as_json: bool, show_logprobs: bool) -> None:
    """Print how likely a text is. `exact`: the score of the fp32 model, to compare an int8 model with."""
    n_tokens, bits = len(score.token_ids), score.bits_per_byte
    context = generator.context_len
    windows = f", in windows of the context, {context}, that overlap by half" if n_tokens > context else ""
    log(f"counted: all tokens, not the end of the text{windows}")
    numbers = {"tokens": n_tokens, "bytes": score.n_bytes, "nats": score.nats}
    numbers |= {"nats_per_token": score.nats / max(n_tokens, 1), "bits_per_byte": bits}
    if exact is not None:
        numbers["bits_per_byte_fp32"] = exact.bits_per_byte
        numbers["cost_of_int8"] = bits / exact.bits_per_byte - 1 if exact.bits_per_byte else 0.0
    if as_json:
        tokens = {"token_ids": score.token_ids, "logprobs": score.logprobs, "top_logprobs": score.top_logprobs}
        print(finite_json({**numbers, **tokens}))
        return
    for line in logprob_lines(generator, score) if show_logprobs else ():
        print(line)
    print(
        "{tokens} tokens, {bytes} bytes: {nats:.4f} nats in all, {nats_per_token:.4f} nats per token, "
        "{bits_per_byte:.4f} bits per byte".format(**numbers)
    )
    if exact is not None:
        print(f"in fp32: {exact.bits_per_byte:.4f} bits per byte; int8 costs {100 * numbers['cost_of_int8']:+.3f} %")


def run_interactive(conversation: Conversation, prompt: str, params: SamplingParams) -> None:
    """Write a text, or a chat, in turns with the user until they leave."""
    sys.stdin.reconfigure(errors="replace")
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        with contextlib.suppress(ImportError):  # missing on some platforms; input() works without it
            import readline  # noqa: F401  (gives input() a history and line editing)
        log(conversation.greeting)
    interrupt = _InterruptHandler()
    if prompt:
        print_text(prompt if conversation.continues_text else "")
        _print_reply(conversation, prompt, params, interrupt)
    while (line := _read_line(is_terminal, interrupt)) is not None:
        try:
            if not line.startswith("/") or line.startswith("//"):
                _print_reply(conversation, line[line.startswith("//") :].replace("\\n", "\n"), params, interrupt)
            elif line.split()[0] == "/quit":
                return
            else:
                params = _run_command(conversation, line.split(), params)
        except UserError as error:
            log(f"error: {error}")


class _InterruptHandler:
    """Ctrl-C, however often pressed, ends the model's turn or the line being typed, but not the session."""

    def __init__(self) -> None:
        self.is_reading = False  # raises only then: elsewhere an exception could fall between two lines of our code
        self.pressed = False
        signal.signal(signal.SIGINT, self._handle)

    def _handle(self, number: int, frame: object) -> None:
        self.pressed = True
        if self.is_reading:
            raise KeyboardInterrupt


def _read_line(is_terminal: bool, interrupt: _InterruptHandler) -> str | None:
    """Read a line; None at the end of input."""
    while True:
        try:
            try:
                interrupt.is_reading = True
                return input("> " if is_terminal else "")
            finally:
                interrupt.is_reading = False
        except EOFError:
            if is_terminal:
                log("")
            return None
        except (KeyboardInterrupt, SystemError):  # input() raises SystemError if it is interrupted twice
            log("\n(Ctrl-D or /quit leaves)")


def _print_reply(conversation: Conversation, text: str, params: SamplingParams, interrupt: _InterruptHandler) -> None:
    params = dataclasses.replace(params, seed=params.seed + len(conversation.turn_starts))
    interrupt.pressed = False
    with contextlib.closing(conversation.reply(text, params)) as pieces:
        for piece in pieces:
            print_text(piece)
            if interrupt.pressed:
                log("\n(interrupted)")
                return
    print_text("\n")
    log(*conversation.news())


def _run_command(conversation: Conversation, words: list[str], params: SamplingParams) -> SamplingParams:
    """Run a /command; returns the sampling parameters to use from now on."""
    name, *rest = words
    if name == "/help":
        log(f"{conversation.description}\n{HELP}")
    elif name == "/undo":
        log("removed" if conversation.undo() else "there is no turn to remove")
    elif name == "/reset":
        conversation.reset()
        log("a new text")
    elif name == "/show":
        print(conversation.text, flush=True)
    elif name == "/set" and len(rest) == 2:
        field = rest[0].replace("-", "_")
        params = _set_param(params, field, rest[1])
        log(f"{rest[0]} is {getattr(params, field)}")
    elif words == ["/set"]:
        log(*(f"{field} {value}" for field, value in dataclasses.asdict(params).items() if field != "logprobs"))
    else:
        raise UserError(f"{' '.join(words)} is not a command; /help lists them{did_you_mean(name, COMMANDS)}")
    return params


def _set_param(params: SamplingParams, name: str, value: str) -> SamplingParams:
    names = [field.name for field in dataclasses.fields(params)]
    if name == "logprobs":
        raise UserError("logprobs are not shown in turns; run generate.py --logprobs N without --interactive")
    if name not in names:
        raise UserError(f"there is no setting {name}{did_you_mean(name, names)}; /set alone lists all")
    if value.lower() == "none":
        return dataclasses.replace(params, **{name: getattr(SamplingParams, name)})
    if name == "stop":
        return dataclasses.replace(params, stop=(value.replace("\\n", "\n"),))
    try:
        return dataclasses.replace(params, **{name: json.loads(value)})
    except (ValueError, RecursionError):
        raise UserError(f"{name} is {value[:40]!r}; it must be a number, or none") from None
