"""The command `thinker configs`: list the configs that come with Thinker, or copy one."""

import argparse
import json
import re
import shutil
import textwrap
from pathlib import Path
from typing import Any

from thinker.runtime.cli import ArgumentParser
from thinker.runtime.errors import UserError, did_you_mean
from thinker.runtime.files import atomic_write
from thinker.runtime.process.invocation import other_command, this_command
from thinker.training.config.shipped import (
    ROOT,
    TEMPLATE,
    ConfigHeader,
    read_header,
    shipped_configs,
)

EXAMPLES = ("", "show small-text", "copy small-text mine.yaml")
MAX_COLUMNS = 110
FIRST = ("quickstart", "small-text", "any-text")  # what most users begin with
GPU = "one CUDA GPU"  # how the hardware of a config begins that needs one


def main() -> int:
    """List the configs, show one or copy one. Returns the exit status."""
    arguments = parse_arguments()
    if arguments.command == "show":
        print(files_to_copy()[arguments.name].read_text(encoding="utf-8"), end="")
    elif arguments.command == "copy":
        copy_config(arguments.name, arguments.out)
    elif arguments.json:
        print_json()
    else:
        print_list()
    return 0


def parse_arguments() -> argparse.Namespace:
    """Parse the command line. Raises UserError for an unknown config."""
    description = "List the configs that come with Thinker, with hardware, time and loss."
    parser = ArgumentParser(description=description, examples=EXAMPLES)
    parser.add_argument("--json", action="store_true", help="print one JSON object per config")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    show = commands.add_parser("show", help="print a config", description="Print a config.")
    copy = commands.add_parser(
        "copy",
        help="write a config to a file, to edit it",
        description="Write a config, or the chat template, to a file, to edit it.",
        examples=("small-text", "small-text mine.yaml", "chat.jinja"),
    )
    for command in (show, copy):
        name = command.add_argument("name", metavar="NAME", help="a config of the list")
        name.completer = complete_name
    out_help = "file to write (default: NAME.yaml)"
    copy.add_argument("out", metavar="FILE", nargs="?", type=Path, help=out_help)
    arguments = parser.parse_args()
    if arguments.command is None:
        return arguments
    if arguments.json:
        raise UserError(f"--json has no effect on {arguments.command}; remove it")
    files = files_to_copy()
    if arguments.name not in files:
        hint = did_you_mean(arguments.name, files) or f"; use one of {', '.join(files)}"
        raise UserError(f"there is no config {arguments.name}{hint}")
    return arguments


def complete_name(**_: Any) -> list[str]:
    """What a shell may put in place of NAME."""
    return sorted(files_to_copy())


def files_to_copy() -> dict[str, Path]:
    """The configs and the chat template, by name."""
    return shipped_configs() | {TEMPLATE.name: TEMPLATE}


def print_list() -> None:
    """Print each config with the first sentences of what it says about itself."""
    configs = shipped_configs()
    first = [name for name in FIRST if name in configs]
    names = [*first, *[name for name in configs if name not in FIRST]]
    headers = {name: read_header(configs[name]) for name in names}
    for_gpu = [name for name in names if headers[name].facts["hardware"].startswith(GPU)]
    others = [name for name in names if name not in for_gpu]
    print("for a laptop:\n")
    print_configs({name: headers[name] for name in others})
    print("\nfor a GPU:\n")
    print_configs({name: headers[name] for name in for_gpu})
    train = other_command("train")
    print(f"\nstart one: {train} NAME [section.key=value ...]")
    print(f"with your text: {train} small-text data.path=my.txt run.dir=runs/mine")
    print("read one: " + this_command() + " show NAME")


def print_configs(headers: dict[str, ConfigHeader]) -> None:
    """Print what configs, by name, say about themselves."""
    width = max(map(len, shipped_configs()))
    columns = min(shutil.get_terminal_size().columns, MAX_COLUMNS)
    for name, header in headers.items():
        print_paragraph(f"{name:{width}}  ", first_sentence(header.purpose), columns)
        for fact, text in header.facts.items():
            print_paragraph(" " * (width + 2), f"{fact}: {first_sentence(text)}", columns)


def print_paragraph(beginning: str, text: str, columns: int) -> None:
    """Print a text as wide as the terminal, below the end of its beginning."""
    options = {"initial_indent": beginning, "subsequent_indent": " " * len(beginning)}
    print(textwrap.fill(text, columns, **options, break_on_hyphens=False))


def first_sentence(text: str) -> str:
    """The first sentence of a text."""
    return re.split(r"(?<=[.;])\s+(?=[A-Z])", text)[0]


def print_json() -> None:
    """Print an object per config."""
    for name, path in shipped_configs().items():
        header = read_header(path)
        values = {"name": name, "path": str(path), "purpose": header.purpose}
        print(json.dumps(values | header.facts))


def copy_config(name: str, out: Path | None) -> None:
    """Write a copy. Raises UserError if a file is in the way."""
    source = files_to_copy()[name]
    if out is None:
        out = Path(source.name)
    if out.exists():
        raise UserError(f"{out} already exists; give another FILE")
    text = source.read_text(encoding="utf-8")
    schema = ROOT / "configs" / "schema.json"  # so that editors find it from there, too
    text = re.sub(r"(?<=\$schema=)\S+", schema.as_posix(), text, count=1)
    atomic_write(out, text)
    print(f"wrote {out}")
    train = other_command("train")
    if source.suffix == ".yaml":
        print(f"train with it: {train} {out}")
    else:
        print(f"use it: {train} CONFIG data.chat_template={out}")
