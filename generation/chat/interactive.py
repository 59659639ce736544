"""Interactive session of generate.py: turns, slash commands, Ctrl-C."""

import contextlib
import dataclasses
import json
import signal
import sys
from pathlib import Path

from thinker.generation.chat.conversation import Conversation
from thinker.generation.command.terminal import log, print_text
from thinker.generation.sampling_params import SamplingParams
from thinker.runtime.errors import UserError, did_you_mean

HELP = r"""Type \n for a line break, and // for / at the start of a line. Ctrl-C stops the model and keeps its text.
/undo             remove the last turn
/reset            start a new text
/show             print the text so far
/set NAME VALUE   change a setting, such as /set temperature 0.5; without arguments, list all settings
/quit             quit (or press Ctrl-D)"""
COMMANDS = ("/undo", "/reset", "/show", "/set", "/help", "/quit")


def run_interactive(
    conversation: Conversation, prompt: str, params: SamplingParams, file: Path | None = None
) -> None:
    """Run a text or chat in turns until the user quits.

    `file`: go on with the conversation in it if it is there, and save the conversation in it at the
    end. Raises UserError if it cannot be read.
    """
    if file is None:
        _run_turns(conversation, prompt, params)
        return
    from thinker.generation.chat.saved_conversation import load_conversation, save_conversation

    if file.exists():
        load_conversation(conversation, file)
        n_turns = len(conversation.turn_starts)
        turns = "1 turn" if n_turns == 1 else f"{n_turns} turns"
        log(f"going on with {file}, {turns}; /show prints them")
    try:
        _run_turns(conversation, prompt, params)
    finally:
        save_conversation(conversation, file)
        log(f"saved in {file}")


def _run_turns(conversation: Conversation, prompt: str, params: SamplingParams) -> None:
    """As run_interactive(), without a file."""
    sys.stdin.reconfigure(errors="replace")
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        with contextlib.suppress(ImportError):  # not on every platform; optional
            import readline  # noqa: F401  (adds history and line editing to input())
        log(conversation.greeting)
    interrupt = _InterruptHandler()
    if prompt:
        if conversation.continues_text:
            print_text(prompt)
        _print_reply(conversation, prompt, params, interrupt)
    while True:
        line = _read_line(is_terminal, interrupt)
        if line is None:
            return
        is_text = not line.startswith("/") or line.startswith("//")
        try:
            if is_text:
                text = line.removeprefix("/").replace("\\n", "\n")
                _print_reply(conversation, text, params, interrupt)
            elif line.split()[0] == "/quit":
                return
            else:
                params = _run_command(conversation, line.split(), params)
        except UserError as error:
            log(f"error: {error}")


class _InterruptHandler:
    """Makes Ctrl-C end the model's turn or the line being typed, but not the session."""

    def __init__(self) -> None:
        # The handler raises only while reading: elsewhere it could interrupt any line.
        self.is_reading = False
        self.pressed = False
        signal.signal(signal.SIGINT, self._handle)

    def _handle(self, number: int, frame: object) -> None:
        self.pressed = True
        if self.is_reading:
            raise KeyboardInterrupt


def _read_line(is_terminal: bool, interrupt: _InterruptHandler) -> str | None:
    """Read a line; None at the end of input."""
    prompt = "> " if is_terminal else ""
    while True:
        try:
            try:
                interrupt.is_reading = True
                return input(prompt)
            finally:
                interrupt.is_reading = False
        except EOFError:
            if is_terminal:
                log("")
            return None
        # input() raises SystemError if it is interrupted twice.
        except (KeyboardInterrupt, SystemError):
            log("\n(press Ctrl-D or type /quit to quit)")


def _print_reply(
    conversation: Conversation, text: str, params: SamplingParams, interrupt: _InterruptHandler
) -> None:
    params = dataclasses.replace(params, seed=params.seed + len(conversation.turn_starts))
    interrupt.pressed = False
    is_empty = True
    with contextlib.closing(conversation.reply(text, params)) as pieces:
        for piece in pieces:
            is_empty = False
            print_text(piece)
            if interrupt.pressed:
                log("\n(interrupted)")
                return
    print_text("\n")
    if is_empty:
        log("(the text has ended; type something, or /undo)")
    log(*conversation.news())


def _run_command(
    conversation: Conversation, words: list[str], params: SamplingParams
) -> SamplingParams:
    """Run a slash command. Returns the sampling parameters for the next turns."""
    name, *rest = words
    if name == "/help":
        log(f"{conversation.description}\n{HELP}")
    elif name == "/undo":
        if conversation.undo():
            log("removed the last turn")
        else:
            log("no turn to remove")
    elif name == "/reset":
        conversation.reset()
        log("started a new text")
    elif name == "/show":
        print(conversation.text, flush=True)
    elif name == "/set" and len(rest) == 2:
        field = rest[0].replace("-", "_")
        params = _set_param(params, field, rest[1])
        log(f"{rest[0]} = {getattr(params, field)}")
    elif words == ["/set"]:
        for field, value in dataclasses.asdict(params).items():
            if field != "logprobs":
                log(f"{field} = {value}")
    else:
        hint = did_you_mean(name, COMMANDS)
        raise UserError(f"unknown command {' '.join(words)}; /help lists commands{hint}")
    return params


def _set_param(params: SamplingParams, name: str, value: str) -> SamplingParams:
    names = [field.name for field in dataclasses.fields(params)]
    if name == "logprobs":
        instead = "use thinker generate --logprobs N without --interactive"
        raise UserError(f"logprobs cannot be set in a session; {instead}")
    if name not in names:
        hint = did_you_mean(name, names)
        raise UserError(f"unknown setting {name}{hint}; /set lists all settings")
    if value.lower() == "none":
        return dataclasses.replace(params, **{name: getattr(SamplingParams, name)})
    if name in ("json_schema", "regex"):
        return dataclasses.replace(params, **{name: value})
    if name == "stop":
        return dataclasses.replace(params, stop=(value.replace("\\n", "\n"),))
    try:
        number = json.loads(value)  # or a list, for logit_bias
    except (ValueError, RecursionError):
        try:
            number = float(value)  # accepts .5
        except ValueError:
            raise UserError(f"{name} is {value[:40]!r}; use a number or none") from None
    return dataclasses.replace(params, **{name: number})
