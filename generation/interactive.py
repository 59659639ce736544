"""The interactive session of generate.py: turns, commands that begin with a slash, Ctrl-C."""

import contextlib
import dataclasses
import json
import signal
import sys

from thinker.generation.conversation import Conversation
from thinker.generation.sampler import SamplingParams
from thinker.generation.terminal import log, print_text
from thinker.runtime.errors import UserError, did_you_mean

HELP = r"""\n in what you type is a line break. Ctrl-C ends the model's turn and keeps what it wrote.
/undo             remove the last turn
/reset            start a new text
/show             print the text so far
/set NAME VALUE   such as /set temperature 0.5; /set alone lists all settings
/quit             leave (so does Ctrl-D); start a line with // to write a text that starts with /"""
COMMANDS = ("/undo", "/reset", "/show", "/set", "/help", "/quit")


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
        number = json.loads(value)  # or a list, of logit_bias
    except (ValueError, RecursionError):
        try:
            number = float(value)  # also .5
        except ValueError:
            raise UserError(f"{name} is {value[:40]!r}; it must be a number, or none") from None
    return dataclasses.replace(params, **{name: number})
