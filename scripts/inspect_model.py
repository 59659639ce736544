"""Looking inside a model: python scripts/inspect_model.py MODEL COMMAND --prompt TEXT."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import Any

from thinker.runtime.cli import ArgumentParser
from thinker.runtime.errors import UserError, run_command

COMMANDS = {
    "explain": "one attention row, number by number (--layer --head --query)",
    "map": "whom each token looks at in one head (--layer --head)",
    "heads": "scores of all heads: entropy, distance, previous token, induction, ...; no prompt needed\n"
    "             --over-training: at every checkpoint of a run; --importance: what each head is worth",
    "flow": "rollout and maximum flow from one position down to the tokens (--position)",
    "attribute": "which tokens, heads and MLPs a prediction comes from (--target --contrast-token --position)",
    "lens": "what the model would say after each layer (--position)",
    "patch": "which place brings a prediction back in another prompt (--corrupt --target --contrast-token)",
    "compare": "two models, or two steps of a run (--other --other-checkpoint); no prompt needed",
    "prune": "take the least important heads out for good (--count or --groups, --out FOLDER)",
}
READ = {  # what each command reads beside the prompt
    "explain": ("layer", "head", "query"),
    "map": ("layer", "head"),
    "heads": ("importance", "text", "texts", "over_training"),
    "flow": ("position",),
    "attribute": ("target", "contrast_token", "position"),
    "lens": ("position",),
    "patch": ("corrupt", "target", "contrast_token"),
    "compare": ("other", "other_checkpoint"),
    "prune": ("importance", "text", "texts", "count", "groups", "out"),
}
WITHOUT_PROMPT = ("heads", "compare", "prune")
ON_THE_PAGE = ("explain", "map", "attribute", "lens")  # what its explorer shows, so that the table may be folded
VIEWS = {"attribute": "attribution", "lens": "lens"}  # where a page about another begins: with attention


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    listed = "\n".join(f"  {name:<10} {what}" for name, what in COMMANDS.items())
    parser = ArgumentParser(
        description=f"What a model does with a text, from the inside.\n\ncommands:\n{listed}",
        epilog='example: %(prog)s runs/quickstart attribute --prompt "Once upon a" --png why.png',
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="MODEL", help="a run directory, a checkpoint, or a Hugging Face folder")
    parser.add_argument("command", metavar="COMMAND", choices=COMMANDS, help=", ".join(COMMANDS))
    parser.add_argument("--prompt", metavar="TEXT", help="what the model reads")
    parser.add_argument("--layer", type=int, metavar="N", help="from 0 (default 0)")
    parser.add_argument("--head", type=int, metavar="N", help="from 0 (default 0)")
    position = "a position, from 0, or from the end below 0 (default -1)"
    parser.add_argument("--query", type=int, metavar="N", help=position)
    parser.add_argument("--position", type=int, metavar="N", help="likewise")
    parser.add_argument("--target", metavar="TOKEN", help="text of one token (default: the likeliest next one)")
    parser.add_argument("--contrast-token", metavar="TOKEN", help="another token, whose logit is taken off")
    parser.add_argument("--corrupt", metavar="TEXT", help="a prompt with as many tokens and another prediction")
    parser.add_argument("--checkpoint", default="latest", help="of a run directory: latest, best or a name")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or mps")
    group = parser.add_argument_group("heads, compare and prune")
    group.add_argument("--over-training", action="store_const", const=True, help="at every checkpoint that is kept")
    group.add_argument("--importance", choices=("zero", "mean", "gradient"),
                       help="what is lost without it, or by its gradient (default of prune: zero)")  # fmt: skip
    group.add_argument("--text", type=Path, metavar="FILE", help="to measure on (default: the run's validation text)")
    group.add_argument("--texts", type=int, metavar="N", help="at most so many pieces of it (default 32)")
    group.add_argument("--other", metavar="MODEL", help="the second model (default: the same)")
    group.add_argument("--other-checkpoint", metavar="NAME", help="of it (default latest)")
    group.add_argument("--count", type=int, metavar="N", help="so many key heads, with the query heads that share them")
    group.add_argument("--groups", metavar="L.K,...", help="these key heads, as layer.head")
    group.add_argument("--out", type=Path, metavar="FOLDER", help="where the pruned model is written")
    group = parser.add_argument_group("what comes out")
    group.add_argument("--json", nargs="?", const="-", metavar="FILE", help="JSON instead of the table, or in a file")
    group.add_argument("--png", type=Path, metavar="FILE", help="a picture of it")
    group.add_argument("--html", type=Path, metavar="FILE", help="a page; with a prompt, one to explore")
    arguments = parser.parse_args()
    check_together(arguments)
    return arguments


def needs_text(arguments: argparse.Namespace) -> bool:
    """Whether it measures the loss on texts."""
    return arguments.importance is not None or arguments.command == "prune"


def check_together(arguments: argparse.Namespace) -> None:
    """Refuse what would not be read, what is missing, and files that cannot be written, before long work begins."""
    command = arguments.command
    for name in sorted({name for names in READ.values() for name in names} - set(READ[command])):
        if getattr(arguments, name) is not None:
            raise UserError(f"--{name.replace('_', '-')} does not go with {command}; leave it out")
    if arguments.prompt is None and command not in WITHOUT_PROMPT:
        raise UserError(f"{command} needs a text: --prompt TEXT")
    if arguments.prompt is not None and needs_text(arguments):
        raise UserError("importance is measured on many texts (--text FILE), not on a --prompt; leave it out")
    if not needs_text(arguments) and (arguments.text is not None or arguments.texts is not None):
        raise UserError("--text and --texts are read with --importance; leave them out")
    if arguments.over_training and needs_text(arguments):
        raise UserError("--over-training and --importance contradict each other; leave one out")
    if arguments.over_training and arguments.checkpoint != "latest":
        raise UserError("--over-training takes every checkpoint; leave out --checkpoint")
    if arguments.texts is not None and arguments.texts < 2:
        raise UserError(f"--texts is {arguments.texts}; it must be at least 2")
    if arguments.target is not None and arguments.target == arguments.contrast_token:
        raise UserError(f"--target and --contrast-token are both {arguments.target!r}; give two tokens")
    if command == "patch" and arguments.corrupt is None:
        raise UserError("patch needs a second prompt: --corrupt TEXT")
    if command == "compare" and arguments.other is None and arguments.other_checkpoint is None:
        raise UserError("compare needs a second model: --other MODEL, or --other-checkpoint NAME of the same")
    if command == "prune" and (arguments.count is None) == (arguments.groups is None):
        raise UserError("prune needs either --count N or --groups LAYER.HEAD,...")
    if arguments.out is not None and arguments.out.exists():
        raise UserError(f"--out {arguments.out} exists; give a new folder")
    files = {"png": arguments.png, "html": arguments.html, "json": arguments.json, "out": arguments.out}
    for file in (Path(file) for file in files.values() if file not in (None, "-")):
        if not file.absolute().parent.is_dir():
            raise UserError(f"cannot write {file}: its folder does not exist")
        if file.is_dir():
            raise UserError(f"cannot write {file}: it is a folder")
        if not os.access(file.absolute().parent, os.W_OK):
            raise UserError(f"cannot write {file}: nothing can be written in its folder")
    given = [Path(file).absolute() for file in files.values() if file not in (None, "-")]
    if len(set(given)) < len(given):
        raise UserError(f"{given[0].name} is named twice; each result needs a file of its own")


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
        parts = " ".join(repr(tokenizer.decode([i])) for i in ids)
        raise UserError(f"--{name} {text!r} is {len(ids)} tokens of this model, {parts}; one is wanted, as in ' cat'")
    return ids[0]


def of_prompt(arguments: argparse.Namespace, model: Any, tokenizer: Any, prompt: Any) -> tuple[Any, dict[str, Any]]:
    """The report of a command about one prompt, and where a page about it begins."""
    from thinker.interpretability import reports
    from thinker.interpretability.explain import explain

    command = arguments.command
    layer = chosen("layer", arguments.layer, len(model.blocks), 0)
    head = chosen("head", arguments.head, model.blocks[layer].attention.n_heads, 0)
    name = "query" if command == "explain" else "position"
    position = chosen(name, getattr(arguments, name), len(prompt.tokens), -1)
    contrast_token, target = (
        one_token(tokenizer, name, getattr(arguments, name)) for name in ("contrast_token", "target")
    )
    if target is None and "target" in READ[command]:
        target = reports.likeliest_next_token(model, prompt, position)
    match command:
        case "explain":
            report = explain(model, prompt, layer, head, position)
        case "map":
            report = reports.report_attention_map(model, prompt, layer, head)
        case "flow":
            report = reports.report_flow(model, prompt, position)
        case "attribute":
            report = reports.attribute(model, tokenizer, prompt, target, contrast_token, position)
        case "lens":
            report = reports.report_logit_lens(model, tokenizer, prompt, position)
        case "patch":
            corrupt = reports.Prompt.read(model, tokenizer, arguments.corrupt)
            report = reports.report_patching(model, tokenizer, prompt, corrupt, target, contrast_token)
    return report, {
        "layer": layer,
        "head": head,
        "position": position,
        "target": target,
        "contrast_token": contrast_token,
    }


def of_heads(arguments: argparse.Namespace, folder: Path, model: Any, tokenizer: Any, prompt: Any, device: Any) -> Any:
    """The report of heads, compare and prune."""
    from thinker.interop import load
    from thinker.interpretability import comparison, reports
    from thinker.training.validation_data import sample_sequences, used_token_ids

    if arguments.importance is None and arguments.command != "prune":
        with tempfile.TemporaryDirectory() as scratch:
            ids = None if tokenizer is None else used_token_ids(folder, tokenizer, Path(scratch))
        origin = "the whole vocabulary" if ids is None else "those in the run's text"
        given = prompt, reports.random_repeats(model, ids), origin
    if arguments.command == "compare":
        path, name = arguments.other or arguments.model, arguments.other_checkpoint or "latest"
        other, its = load(path, device, name)
        if prompt is not None and (its is None or its.encode(arguments.prompt) != tokenizer.encode(arguments.prompt)):
            raise UserError("the two models have other tokens for this prompt; leave it out, or compare others")
        names = f"{arguments.model} {arguments.checkpoint}", f"{path} {name}"
        return comparison.compare(model, other, *given, names)
    if arguments.over_training:
        return comparison.report_over_training(steps_of(Path(arguments.model), device), *given)
    if arguments.command == "heads" and arguments.importance is None:
        return reports.report_heads(model, *given)
    with tempfile.TemporaryDirectory() as scratch:
        texts = sample_sequences(model, tokenizer, folder, arguments.text, arguments.texts or 32, Path(scratch))
    if arguments.command == "heads":
        return comparison.report_importance(model, texts, arguments.importance)
    groups = None if arguments.groups is None else read_groups(arguments.groups)
    left, report = comparison.report_pruning(model, texts, arguments.importance or "zero", arguments.count, groups)
    if arguments.out is not None:
        from thinker import checkpoint

        try:
            checkpoint.save(arguments.out, left, {"step": 0})
            tokenizer.save(arguments.out)
        except OSError as error:
            raise UserError(f"cannot write {arguments.out}: {error.strerror}") from error
        print(f"wrote {arguments.out}: python generate.py {arguments.out}", file=sys.stderr)
    else:
        print("nothing is written; --out FOLDER writes the smaller model", file=sys.stderr)
    return report


def steps_of(run: Path, device: Any) -> list[tuple[int, Any]]:
    """The steps of a run's checkpoints, and what opens each. Raises UserError where there are fewer than two."""
    from thinker.checkpoint import list_checkpoints
    from thinker.interop import load

    if not (run / "checkpoints").is_dir():
        raise UserError(f"{run} is no run directory; --over-training needs the checkpoints of one")
    found = list_checkpoints(run / "checkpoints")
    if len(found) < 2:
        raise UserError(f"{run} keeps {len(found)} checkpoints; train with train.keep_every=N, which keeps more")
    return [(int(path.name.split("-")[1]), lambda path=path: load(path, device)[0]) for path in found]


def read_groups(text: str) -> list[tuple[int, int]]:
    """ "0.1,2.3" as pairs. Raises UserError."""
    pairs = [part.split(".") for part in text.split(",")]
    if not all(len(pair) == 2 and all(number.isdecimal() for number in pair) for pair in pairs):
        raise UserError(f"--groups {text} is no list such as 0.1,2.3: layer and key head, both from 0")
    return [(int(layer), int(group)) for layer, group in pairs]


def main() -> int:
    """Load, look, print, draw. Returns the exit status."""
    arguments = parse_arguments()
    from thinker.interop import load
    from thinker.interop.load import find_model
    from thinker.interpretability.reports import Prompt
    from thinker.runtime.device import choose_device, configure_backend

    device = choose_device(arguments.device)
    configure_backend(device)
    folder = find_model(arguments.model, arguments.checkpoint)
    model, tokenizer = load(folder, device)
    if tokenizer is None and (arguments.prompt is not None or needs_text(arguments)):
        raise UserError(f"{arguments.model} has no tokenizer, so it cannot read a text")
    prompt, start = None, {}
    if arguments.prompt is not None:
        prompt = Prompt.read(model, tokenizer, arguments.prompt)
    if arguments.command in WITHOUT_PROMPT:
        report = of_heads(arguments, folder, model, tokenizer, prompt, device)
    else:
        report, start = of_prompt(arguments, model, tokenizer, prompt)
    try:
        text = json.dumps(report.data, allow_nan=False)
    except ValueError as error:
        raise UserError(f"what {arguments.model} computes is not finite: {error}") from error
    title = f"{arguments.model}: {arguments.command}"
    if arguments.prompt is not None:
        title += f" · {textwrap.shorten(arguments.prompt, 70, placeholder=' …')}"
    print(text if arguments.json == "-" else report.table())
    if arguments.json not in (None, "-"):
        write(Path(arguments.json), text)
    if arguments.png is not None:
        from thinker.interpretability.plots import draw

        draw(report.panels, arguments.png, title, report.across)
    if arguments.html is not None:
        from thinker.interpretability import html_report

        at = {name: start.pop(name) for name in ("layer", "head") if name in start}
        explorer = None
        if prompt is not None:
            explorer = html_report.gather(model, tokenizer, prompt, around=tuple(at.values()) or (0, 0), **start)
        at |= {"position": start.get("position", -1), "view": VIEWS.get(arguments.command, "attention")}
        fold = arguments.command in ON_THE_PAGE
        html_report.write_html_report(arguments.html, title, report, explorer, **at, fold=fold)
    for file in (arguments.png, arguments.html, arguments.json):
        if file not in (None, "-"):
            print(f"wrote {file}", file=sys.stderr)
    return 0


def write(path: Path, text: str) -> None:
    """A file as a whole. Raises UserError where it cannot be written."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error


if __name__ == "__main__":
    run_command(main)
