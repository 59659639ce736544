"""What a person sees of sampling: texts as they are made, scores, and a conversation."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import signal
import sys
import time
from typing import Any

from thinker.generation.conversation import Conversation
from thinker.generation.engine import Generator, Score
from thinker.generation.sampler import SamplingParams
from thinker.generation.sequence import Completion
from thinker.runtime.errors import UserError, did_you_mean

HELP = r"""Whatever you type is added to the text, and the model goes on from there; an empty line: it just goes on.
\n in what you type is a new line. Ctrl-C ends the model's turn and keeps what it said.
/undo             take back the last turn
/reset            begin a new text
/show             the text so far
/set NAME VALUE   such as /set temperature 0.5; /set alone shows all settings
/quit             leave (so does Ctrl-D); a line that begins with // is text that begins with /"""


def say(text: str, end: str = "") -> None:
    """To standard output, at once."""
    print(text, end=end, flush=True)


def note(text: str) -> None:
    """To standard error."""
    print(text, file=sys.stderr, flush=True)


def print_samples(
    generator: Generator,
    prompt: str,
    params: SamplingParams,
    count: int,
    as_json: bool,
    show_logprobs: bool,
    asked: list[int] | None = None,
) -> None:
    """Several continuations of one prompt, ended by a line ---; the first one as it is made, the others in its wake.

    `asked`: the prompt's tokens where it is a message to be answered; then only the answers are shown.
    """
    completions = [Completion(prompt) for _ in range(count)]
    start = time.perf_counter()
    first = None  # seconds to the first text
    if not as_json:
        say("" if asked else prompt)
    prompts = None if asked is None else [asked] * count
    for index, piece in generator.stream_all(completions, params, prompts):
        first = time.perf_counter() - start if first is None else first
        if index == 0 and not as_json:
            say(piece)
    seconds = time.perf_counter() - start
    if as_json:
        for index, completion in enumerate(completions):
            print(json.dumps({**dataclasses.asdict(completion), "seed": params.seed + index}, ensure_ascii=False))
        return
    for completion in completions[1:]:
        say(f"\n\n---\n\n{'' if asked else prompt}{completion.text}")
    say("\n")
    for completion in completions if show_logprobs else []:
        note_logprobs(generator, completion.token_ids, completion.logprobs, completion.top_logprobs)
    note_summary(generator, completions, params.max_new_tokens, seconds, first)


def note_summary(
    generator: Generator, completions: list[Completion], asked: int, seconds: float, first: float | None
) -> None:
    """How many tokens, of those asked for, how fast, what was drafted and what was n_evicted."""
    made = sum(len(completion.token_ids) for completion in completions)
    text = f"{made} tokens, {made / seconds:.0f} a second"
    if first is not None:
        text += f", the first text after {first:.2f} s"
    drafted = sum(completion.drafted for completion in completions)
    if generator.speculate:
        text += f"; {sum(completion.accepted for completion in completions)} of {drafted} drafted tokens were right"
    note(text)
    if any(one.finish_reason == "length" and len(one.token_ids) < asked for one in completions):
        goes_on = "; --window says how much of it to remember, and goes on" if generator.can_roll else ""
        note(f"the text ends where the model's context does, at {generator.longest} tokens{goes_on}")
    longest = max(completions, key=lambda completion: completion.n_evicted)
    if longest.n_evicted:
        end = generator.sinks + longest.n_evicted
        note(
            f"n_evicted at the end: tokens {generator.sinks + 1} to {end} of {end + generator.window + 1}; remembered: "
            f"the first {generator.sinks} and the newest {generator.window}"
        )


def note_logprobs(
    generator: Generator, tokens: list[int], logprobs: list[float], top: list[dict[int, float]], write: Any = note
) -> None:
    """A line a token: its log-probability in nats, itself, and the likeliest in its place."""

    def shown(token: int) -> str:
        return json.dumps(generator.tokenizer.decode([token]) or f"<{token}>", ensure_ascii=False)

    for place, (token, logprob) in enumerate(zip(tokens, logprobs)):
        others = "  ".join(f"{shown(other)} {value:.3f}" for other, value in (top[place] if top else {}).items())
        write(f"{logprob:9.4f}  {shown(token):<16} {others}".rstrip())


def print_score(generator: Generator, text: str, top: int | None, as_json: bool, exact: Score | None) -> None:
    """How likely a text is; `top`: also a line a token. `exact` is the score in full precision, to compare with."""
    score = generator.score(text, top or 0)
    numbers = {
        "tokens": len(score.token_ids),
        "bytes": score.n_bytes,
        "nats": score.nats,
        "nats_per_token": score.nats / max(len(score.token_ids), 1),
        "bits_per_byte": score.bits_per_byte,
    }
    if exact is not None:
        numbers["bits_per_byte_fp32"] = exact.bits_per_byte
        numbers["cost_of_int8"] = score.bits_per_byte / exact.bits_per_byte - 1 if exact.bits_per_byte else 0.0
    if as_json:
        each = {"token_ids": score.token_ids, "logprobs": score.logprobs, "top_logprobs": score.top_logprobs}
        print(json.dumps({**numbers, **each}, ensure_ascii=False))
        return
    if top is not None:
        note_logprobs(generator, score.token_ids, score.logprobs, score.top_logprobs, print)
    print(
        f"{numbers['tokens']} tokens, {numbers['bytes']} bytes: {numbers['nats']:.4f} nats in all, "
        f"{numbers['nats_per_token']:.4f} nats a token, {numbers['bits_per_byte']:.4f} bits a byte"
    )
    if exact is not None:
        print(f"in fp32: {exact.bits_per_byte:.4f} bits a byte; int8 costs {100 * numbers['cost_of_int8']:+.3f} %")


def converse(generator: Generator, prompt: str, params: SamplingParams) -> None:
    """A text written in turns, until the person leaves."""
    conversation = Conversation(generator)
    is_person = sys.stdin.isatty()
    if is_person:
        with contextlib.suppress(ImportError):  # not on every platform; input() works without
            import readline  # noqa: F401  (gives input() a history and a line that can be edited)
        note("Type the beginning of a text; /help says what else there is.")
    ctrl_c = _CtrlC()
    if prompt:
        say(prompt)
        _turn(conversation, prompt, params, ctrl_c)
    while (line := _ask(is_person, ctrl_c)) is not None:
        try:
            if not line.startswith("/") or line.startswith("//"):
                _turn(conversation, line.replace("//", "/", 1).replace("\\n", "\n"), params, ctrl_c)
            elif line.split()[0] == "/quit":
                return
            else:
                params = _command(conversation, line.split(), params)
        except UserError as error:
            note(f"error: {error}")


class _CtrlC:
    """Ctrl-C, however often it is pressed, ends the model's turn or the line that is typed, not the conversation."""

    def __init__(self) -> None:
        self.is_asking = False  # only then it raises: anywhere else an exception could fall between two lines of ours
        self.pressed = False
        signal.signal(signal.SIGINT, self._press)

    def _press(self, number: int, frame: object) -> None:
        self.pressed = True
        if self.is_asking:
            raise KeyboardInterrupt


def _ask(is_person: bool, ctrl_c: _CtrlC) -> str | None:
    """A line; None at the end of input."""
    while True:
        try:
            try:
                ctrl_c.is_asking = True
                return input("> " if is_person else "")
            finally:
                ctrl_c.is_asking = False
        except EOFError:
            if is_person:
                note("")
            return None
        except (KeyboardInterrupt, SystemError):  # the second from input(), interrupted again meanwhile
            note("\n(Ctrl-D or /quit leaves)")


def _turn(conversation: Conversation, text: str, params: SamplingParams, ctrl_c: _CtrlC) -> None:
    params = dataclasses.replace(params, seed=params.seed + len(conversation.turns))
    ctrl_c.pressed = False
    with contextlib.closing(conversation.say(text, params)) as pieces:
        for piece in pieces:
            say(piece)
            if ctrl_c.pressed:
                note("\n(interrupted)")
                return
    say("\n")


def _command(conversation: Conversation, words: list[str], params: SamplingParams) -> SamplingParams:
    """Do what a line that begins with / says; returns the settings from now on."""
    name, *rest = words
    if name == "/help":
        note(HELP)
    elif name == "/undo":
        note("taken back" if conversation.undo() else "there is no turn to take back")
    elif name == "/reset":
        conversation.reset()
        note("a new text")
    elif name == "/show":
        say(conversation.text, "\n")
    elif name == "/set" and len(rest) == 2:
        params = _set(params, rest[0].replace("-", "_"), rest[1])
        note(f"{rest[0]} is {getattr(params, rest[0].replace('-', '_'))}")
    elif name == "/set" and not rest:
        for field in dataclasses.fields(params):
            note(f"{field.name} {getattr(params, field.name)}")
    else:
        commands = ["/undo", "/reset", "/show", "/set", "/help", "/quit"]
        raise UserError(f"{' '.join(words)} is no command, /help lists them{did_you_mean(name, commands)}")
    return params


def _set(params: SamplingParams, name: str, value: str) -> SamplingParams:
    names = [field.name for field in dataclasses.fields(params)]
    if name not in names:
        raise UserError(f"there is no setting {name}{did_you_mean(name, names)}; /set alone shows all")
    if name == "stop":
        return dataclasses.replace(params, stop=(value.replace("\\n", "\n"),))
    if value.lower() == "none":
        return dataclasses.replace(params, **{name: getattr(SamplingParams(), name)})
    try:
        number = json.loads(value)
    except ValueError:
        raise UserError(f"{name} is {value!r}; it must be a number, or none") from None
    return dataclasses.replace(params, **{name: number})
