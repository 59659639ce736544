"""Looking inside a model: python scripts/inspect_model.py MODEL COMMAND --prompt TEXT."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from errors import UserError, run_command
from generate import Parser

COMMANDS = {
    "explain": "one attention row, number by number (--layer --head --query)",
    "map": "whom each token looks at in one head (--layer --head)",
    "heads": "entropy, distance, previous-token, induction and other scores of all heads; the prompt may be left out",
    "flow": "rollout and maximum flow from one position down to the tokens (--position)",
    "attribute": "which tokens, heads and MLPs a prediction comes from (--target --against --position)",
    "lens": "what the model would say after each layer (--position)",
    "patch": "which place brings a prediction back in another prompt (--corrupt --target --against)",
}
READ = {  # what each command reads beside the prompt
    "explain": ("layer", "head", "query"),
    "map": ("layer", "head"),
    "heads": (),
    "flow": ("position",),
    "attribute": ("target", "against", "position"),
    "lens": ("position",),
    "patch": ("corrupt", "target", "against"),
}


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    listed = "\n".join(f"  {name:<10} {what}" for name, what in COMMANDS.items())
    parser = Parser(
        description=f"What a model does with a text, from the inside.\n\ncommands:\n{listed}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="MODEL", help="a run directory, a checkpoint, or a Hugging Face folder")
    parser.add_argument("command", metavar="COMMAND", choices=COMMANDS, help=", ".join(COMMANDS))
    parser.add_argument("--prompt", metavar="TEXT")
    parser.add_argument("--layer", type=int, metavar="N", help="from 0 (default 0)")
    parser.add_argument("--head", type=int, metavar="N", help="from 0 (default 0)")
    parser.add_argument(
        "--query", type=int, metavar="N", help="a position, from 0, or from the end below 0 (default -1)"
    )
    parser.add_argument("--position", type=int, metavar="N", help="likewise")
    parser.add_argument("--target", metavar="TOKEN", help="text of one token (default: the likeliest next one)")
    parser.add_argument("--against", metavar="TOKEN", help="another token, whose logit is taken off")
    parser.add_argument(
        "--corrupt", metavar="TEXT", help="a prompt with as many tokens, where the prediction is another"
    )
    parser.add_argument("--checkpoint", default="latest", help="of a run directory: latest, best or a name")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or mps")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    parser.add_argument("--png", type=Path, metavar="FILE", help="a picture of it")
    arguments = parser.parse_args()
    command = arguments.command
    for name in {name for names in READ.values() for name in names} - set(READ[command]):
        if getattr(arguments, name) is not None:
            raise UserError(f"--{name} does not go with {command}; leave it out")
    if arguments.prompt is None and command != "heads":
        raise UserError(f"{command} needs a text: --prompt TEXT")
    if command == "patch" and arguments.corrupt is None:
        raise UserError("patch needs a second prompt: --corrupt TEXT")
    if arguments.png is not None and command in ("explain", "lens"):
        raise UserError(f"there is no picture of {command}; leave out --png")
    return arguments


def chosen(name: str, value: int | None, size: int, default: int) -> int:
    """A number of a layer, head or position that there is. Raises UserError."""
    value = default if value is None else value
    if not (-size if default < 0 else 0) <= value < size:
        raise UserError(f"--{name} is {value}; there are {size}, counted from 0")
    return value


def one_token(tokenizer: Any, name: str, text: str | None) -> int | None:
    """The id of a token's text. Raises UserError where it is none, or several."""
    if text is None:
        return None
    ids = tokenizer.encode(text, allow_special=True)
    if len(ids) != 1:
        raise UserError(f"--{name} {text!r} is {len(ids)} tokens of this model; one is wanted (with its space: ' cat')")
    return ids[0]


def main() -> int:
    """Load, look, print, draw. Returns the exit status."""
    arguments = parse_arguments()
    from analysis import reports
    from device import choose_device
    from storage import load

    thinker, tokenizer = load(arguments.model, choose_device(arguments.device), arguments.checkpoint)
    if tokenizer is None:
        raise UserError(f"{arguments.model} has no tokenizer, so it cannot read a prompt")
    prompt = None if arguments.prompt is None else reports.Prompt.read(thinker, tokenizer, arguments.prompt)
    size = 0 if prompt is None else len(prompt.tokens)
    layer = chosen("layer", arguments.layer, thinker.config.n_layers, 0)
    head = chosen("head", arguments.head, thinker.config.n_heads, 0)
    name = "query" if arguments.command == "explain" else "position"
    position = -1 if prompt is None else chosen(name, getattr(arguments, name), size, -1)
    against, target = (one_token(tokenizer, name, getattr(arguments, name)) for name in ("against", "target"))
    if target is None and "target" in READ[arguments.command]:
        target = reports.choose_target(thinker, prompt, position)
    match arguments.command:
        case "explain":
            report = reports.explain(thinker, prompt, layer, head, position)
        case "map":
            report = reports.map_head(thinker, prompt, layer, head)
        case "heads":
            report = reports.measure_heads(thinker, prompt)
        case "flow":
            report = reports.show_flow(thinker, prompt, position)
        case "attribute":
            report = reports.attribute(thinker, tokenizer, prompt, target, against, position)
        case "lens":
            report = reports.show_lens(thinker, tokenizer, prompt, position)
        case "patch":
            corrupt = reports.Prompt.read(thinker, tokenizer, arguments.corrupt)
            report = reports.show_patch(thinker, tokenizer, prompt, corrupt, target, against)
    print(json.dumps(report.data) if arguments.json else report.table())
    if arguments.png is not None:
        from analysis.pictures import draw

        draw(report.panels, arguments.png, f"{arguments.model}: {arguments.command}")
    return 0


if __name__ == "__main__":
    run_command(main)
