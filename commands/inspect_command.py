"""The command `thinker inspect`: what a model computes."""

import argparse
import re
import shlex
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import Any

from thinker.runtime.cli import ArgumentParser
from thinker.runtime.errors import UserError
from thinker.runtime.files import output_file
from thinker.runtime.plot_style import png_file
from thinker.runtime.process.invocation import other_command

IN_EXPLORER = (
    "explain",
    "map",
    "attribute",
    "lens",
)  # shown by the interactive report, which folds their table
OPTIONS = {  # of the reports on one prompt, as flags
    "explain": ("layer", "head"),
    "map": ("layer", "head"),
    "flow": ("position",),
    "attribute": ("target", "contrast_token", "position"),
    "lens": ("position",),
    "patch": ("corrupt", "target", "contrast_token"),
}
VIEWS = {"attribute": "attribution", "lens": "lens"}  # views to open; for other commands: attention


def parse_arguments() -> argparse.Namespace:
    """Parse the command line, with one subparser per command."""
    prompt, optional_prompt, texts, prune_texts, target, position = (
        ArgumentParser(add_help=False) for _ in range(6)
    )
    prompt.add_argument("--prompt", metavar="TEXT", required=True, help="text to run the model on")
    optional_prompt.add_argument(
        "--prompt", metavar="TEXT", help="text to run the model on (default: random tokens)"
    )
    for flags, when in ((texts, "with --importance: "), (prune_texts, "")):
        text_help = f"{when}text to measure on (default: validation split)"
        flags.add_argument("--text", type=Path, metavar="FILE", help=text_help)
        flags.add_argument(
            "--texts", type=int, help=f"{when}maximum number of sequences (default: 32)"
        )
    target.add_argument(
        "--target", metavar="TOKEN", help="predicted token (default: the most likely next token)"
    )
    contrast_help = "token whose logit is subtracted from the target's (default: none)"
    target.add_argument("--contrast-token", metavar="TOKEN", help=contrast_help)
    index = {
        "type": int,
        "default": -1,
        "help": "position in the prompt; negative counts from the end",
    }
    position.add_argument("--position", **index)

    examples = (
        'attribute runs/quickstart --prompt "Once upon a time" --png why.png',
        "COMMAND --help",
    )
    description = "Inspect what a model computes: attention, attribution, heads, pruning."
    parser = ArgumentParser(description=description, examples=examples)
    defaults = {
        "prompt": None,
        "layer": 0,
        "head": 0,
        "position": -1,
        "target": None,
        "contrast_token": None,
    }
    parser.set_defaults(**defaults, importance=None, over_training=False, out=None)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    def add_command(
        name: str, summary: str, parents: list[ArgumentParser], *examples: str
    ) -> ArgumentParser:
        shared = ArgumentParser(add_help=False)
        alternative = ""
        if name == "explain":
            alternative = ", or a JSON file with vectors q, k and v"
        shared.add_model("model", "MODEL", alternative)
        shared.add_argument("--device", default="auto", help="auto, cpu, cuda or mps")
        group = shared.add_argument_group("output")
        group.add_argument(
            "--json", nargs="?", const="-", metavar="FILE", help="print JSON, or write it to FILE"
        )
        group.add_argument("--png", type=png_file, metavar="FILE", help="plot the report")
        html_help = "write an HTML report" + (
            "" if name in ("prune", "content") else " (interactive with --prompt)"
        )
        group.add_argument("--html", type=Path, metavar="FILE", help=html_help)
        options = {"help": summary, "description": summary, "parents": [shared, *parents]}
        return commands.add_parser(
            name, **options, examples=[f"runs/quickstart {example}" for example in examples]
        )

    once, goat = '--prompt "Once upon a time"', '--prompt "Noah has a goat. Noah has a"'
    explain = add_command(
        "explain",
        "compute one attention row step by step",
        [],
        f"{once} --layer 0 --head 3",
        f"{once} --query 2 --png row.png",
    )
    explain.add_argument(
        "--prompt", metavar="TEXT", help="text to run the model on; omit if MODEL is JSON"
    )
    attention_map = add_command(
        "map",
        "show what each token attends to in one head",
        [prompt],
        f"{once} --layer 0 --head 3",
        f"{once} --html page.html",
    )
    for command in (explain, attention_map):
        command.add_argument("--layer", type=int, default=0, help="layer, counted from 0")
        command.add_argument("--head", type=int, default=0, help="head, counted from 0")
    explain.add_argument("--query", dest="position", **index)
    heads = add_command(
        "heads",
        "score all heads: entropy, distance, induction, importance",
        [optional_prompt, texts],
        f"{once} --png heads.png",
        "--importance zero --texts 64",
    )
    over = heads.add_mutually_exclusive_group()
    over.add_argument(
        "--over-training",
        action="store_true",
        help="score the heads of every checkpoint of the run",
    )
    importance = {
        "choices": ("zero", "mean", "gradient"),
        "help": "rank heads by loss when ablated, or by gradient",
    }
    over.add_argument("--importance", **importance)
    content = add_command(
        "content",
        "score all heads on tales: facts, subjects, word classes",
        [],
        "--png content.png",
    )
    content.add_argument(
        "--stories", type=int, default=32, help="number of new stories, on which no run was trained"
    )
    add_command(
        "flow",
        "trace attention from a position to the tokens: rollout, maximum flow",
        [prompt, position],
        once,
        f"{once} --position 3 --png flow.png",
    )
    add_command(
        "attribute",
        "attribute a prediction to tokens, heads and MLPs",
        [prompt, target, position],
        once,
        f'{goat} --contrast-token " pony" --png why.png',
    )
    add_command(
        "lens",
        "show what the model would predict after each layer",
        [prompt, position],
        once,
        f"{once} --position 3 --png lens.png",
    )
    corrupt = '--corrupt "Noah has a pony. Noah has a"'
    patch = add_command(
        "patch",
        "find activations that restore a prediction in another prompt",
        [prompt, target],
        f"{goat} {corrupt}",
        f"{goat} {corrupt} --png patch.png",
    )
    corrupt_help = "prompt with the same number of tokens but a different prediction"
    patch.add_argument("--corrupt", metavar="TEXT", required=True, help=corrupt_help)
    compare = add_command(
        "compare",
        "compare two models, or two checkpoints of a run",
        [optional_prompt],
        "--other runs/pruned",
        "--other-checkpoint best",
    )
    compare.add_argument("--other", metavar="MODEL", help="second model (default: MODEL)")
    compare.add_argument(
        "--other-checkpoint",
        metavar="NAME",
        help="checkpoint of the second model (default: latest)",
    )
    prune = add_command(
        "prune",
        "remove heads from a model permanently",
        [prune_texts],
        "--count 2 --out runs/pruned",
        "--groups 0.1,2.3 --out runs/pruned",
    )
    prune.add_argument("--importance", **importance, default="zero")
    groups = prune.add_mutually_exclusive_group(required=True)
    groups.add_argument(
        "--count", type=int, help="remove the N least important KV heads with their query heads"
    )
    groups.add_argument(
        "--groups",
        type=parse_groups,
        metavar="L.K,...",
        help="KV heads to remove, as LAYER.KV_HEAD",
    )
    prune.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="folder for the pruned model (default: not saved)",
    )
    arguments = parser.parse_args()
    parser.check_utf8(arguments, "prompt", "corrupt", "target", "contrast_token")
    check_arguments(arguments)
    return arguments


def parse_groups(text: str) -> list[tuple[int, int]]:
    """Parse "0.1,2.3" as pairs. Raises UserError."""
    if not re.fullmatch(r"\d+\.\d+(,\d+\.\d+)*", text):
        raise UserError(
            f"--groups {text} is not a list of LAYER.KV_HEAD, such as 0.1,2.3 (both counted from 0)"
        )
    groups = []
    for pair in text.split(","):
        layer, group = pair.split(".")
        groups.append((int(layer), int(group)))
    if len(set(groups)) < len(groups):
        raise UserError(f"--groups {text} lists a head twice; list each head once")
    return groups


def check_arguments(arguments: argparse.Namespace) -> None:
    """Reject contradicting flags and files that cannot be written before long work begins. Raises
    UserError."""
    command = arguments.command
    if command == "explain":
        from thinker.interpretability.explain import check_arguments as check_vectors

        check_vectors(arguments)
    if command == "heads":
        if arguments.importance is None and (
            arguments.text is not None or arguments.texts is not None
        ):
            raise UserError(
                "--text and --texts have no effect without --importance; add it, or remove them"
            )
        if arguments.importance is not None and arguments.prompt is not None:
            raise UserError(
                "--prompt has no effect with --importance, which reads many texts; use --text FILE"
            )
        if arguments.over_training and arguments.checkpoint != "latest":
            raise UserError(
                "--checkpoint has no effect with --over-training, which reads every "
                "checkpoint; remove it"
            )
    if command in ("heads", "prune") and arguments.texts is not None and arguments.texts < 2:
        raise UserError(f"--texts is {arguments.texts}; use at least 2")
    if arguments.target is not None and arguments.target == arguments.contrast_token:
        raise UserError(
            f"--target and --contrast-token are both {arguments.target!r}; give two different "
            f"tokens"
        )
    if command == "compare" and arguments.other is None and arguments.other_checkpoint is None:
        raise UserError(
            "compare needs a second model; add --other MODEL or --other-checkpoint NAME"
        )
    if arguments.out is not None and arguments.out.exists():
        raise UserError(f"--out {arguments.out} already exists; give a new folder")
    named = [
        file
        for file in (arguments.png, arguments.html, arguments.json, arguments.out)
        if file not in (None, "-")
    ]
    if len({output_file(file).absolute() for file in named}) < len(named):
        raise UserError(
            f"two outputs go to the same file: {', '.join(map(str, named))}; use different files"
        )


def report_on_prompt(
    arguments: argparse.Namespace, model: Any, tokenizer: Any, prompt: Any
) -> tuple[Any, dict[str, Any]]:
    """Make the report of a command on one prompt, and the initial state of its interactive
    report."""
    from thinker.api import inspecting

    command = arguments.command
    inspecting.check_head(model, arguments.layer, arguments.head)
    options = {name: getattr(arguments, name) for name in OPTIONS[command]}
    if command == "explain":
        options["query"] = arguments.position
    report = inspecting.REPORTS[command](model, tokenizer, prompt, **options)
    tokens = inspecting.encode_targets(tokenizer, arguments.target, arguments.contrast_token)
    start = {
        "layer": arguments.layer,
        "head": arguments.head,
        "position": arguments.position,
        "view": VIEWS.get(command, "attention"),
        "target": tokens[0],
        "contrast_token": tokens[1],
    }
    return report, start


def report_on_heads(
    arguments: argparse.Namespace, folder: Path, model: Any, tokenizer: Any, prompt: Any
) -> Any:
    """Make the report of heads, content, compare or prune."""
    from thinker import checkpoint
    from thinker.interop import load
    from thinker.interpretability import comparison, content_report, head_reports
    from thinker.training.data.open_run import sample_sequences, used_token_ids

    if arguments.command == "content":
        return content_report.report_content(model, tokenizer, folder, arguments.stories)
    if arguments.importance is None:
        with tempfile.TemporaryDirectory() as scratch:
            ids = None if tokenizer is None else used_token_ids(folder, tokenizer, Path(scratch))
        origin = "the whole vocabulary" if ids is None else "the run's text"
        measured_on = prompt, head_reports.random_repeats(model, ids), origin
        if arguments.over_training:
            paths = checkpoint.list_checkpoints(Path(arguments.model) / "checkpoints")
            if len(paths) < 2:
                problem = (
                    f"--over-training needs at least 2 checkpoints; {arguments.model} "
                    f"has {len(paths)}"
                )
                raise UserError(f"{problem} (set train.keep_every to keep more)")
            steps = [
                (int(path.name.split("-")[1]), lambda path=path: load(path, model.device)[0])
                for path in paths
            ]
            return comparison.report_over_training(steps, *measured_on)
        if arguments.command == "heads":
            return head_reports.report_heads(model, *measured_on)
        path, name = arguments.other or arguments.model, arguments.other_checkpoint or "latest"
        other, other_tokenizer = load(path, model.device, name)
        text = arguments.prompt
        if text is not None and (
            other_tokenizer is None or other_tokenizer.encode(text) != tokenizer.encode(text)
        ):
            raise UserError(
                "the models tokenize --prompt differently; remove it, or use models with "
                "equal tokenizers"
            )
        names = f"{arguments.model} {arguments.checkpoint}", f"{path} {name}"
        return comparison.compare(model, other, *measured_on, names)
    with tempfile.TemporaryDirectory() as scratch:
        texts = sample_sequences(
            model, tokenizer, folder, arguments.text, arguments.texts or 32, Path(scratch)
        )
    if arguments.command == "heads":
        return comparison.report_importance(model, texts, arguments.importance)
    pruned, report = comparison.report_pruning(
        model, texts, arguments.importance, arguments.count, arguments.groups
    )
    if arguments.out is None:
        print("the pruned model is not saved; use --out FOLDER to save it", file=sys.stderr)
        return report
    checkpoint.save(arguments.out, pruned, {"step": 0})
    tokenizer.save(arguments.out)
    print(
        f"wrote {arguments.out}; sample with: {other_command('generate')} "
        f"{shlex.quote(str(arguments.out))}",
        file=sys.stderr,
    )
    return report


def make_report(arguments: argparse.Namespace) -> tuple[Any, dict[str, Any], Any, Any, Any]:
    """Load the model, if any. Returns report, initial state of the interactive report, model,
    tokenizer, prompt."""
    if arguments.command == "explain" and arguments.prompt is None:
        from thinker.interpretability.explain import explain_vectors

        return explain_vectors(Path(arguments.model), arguments.position), {}, None, None, None
    from thinker.interop import load
    from thinker.interop.find import find_model
    from thinker.interpretability.reports import Prompt
    from thinker.runtime.backend import configure_backend
    from thinker.runtime.device import choose_device

    device = choose_device(arguments.device)
    configure_backend(device)
    folder = find_model(arguments.model, arguments.checkpoint)
    model, tokenizer = load(folder, device)
    if tokenizer is None and (arguments.prompt is not None or arguments.importance is not None):
        raise UserError(
            f"{arguments.model} has no tokenizer, so it cannot read text; use a model saved "
            f"with one"
        )
    prompt = (
        None if arguments.prompt is None else Prompt.from_text(model, tokenizer, arguments.prompt)
    )
    if arguments.command in ("heads", "content", "compare", "prune"):
        return (
            report_on_heads(arguments, folder, model, tokenizer, prompt),
            {},
            model,
            tokenizer,
            prompt,
        )
    return *report_on_prompt(arguments, model, tokenizer, prompt), model, tokenizer, prompt


def main() -> int:
    """Print and write a report. Returns the exit status."""
    arguments = parse_arguments()
    from thinker.interpretability import html_report, plots
    from thinker.runtime.checks import finite_json

    report, start, model, tokenizer, prompt = make_report(arguments)
    text = finite_json(report.data)
    shown = (
        ""
        if arguments.prompt is None
        else f" · {textwrap.shorten(arguments.prompt, 70, placeholder=' …')}"
    )
    title = f"{arguments.model}: {arguments.command}{shown}"
    if arguments.json == "-":
        print(text)
    else:
        print(report.table())
    if arguments.json not in (None, "-"):
        Path(arguments.json).write_text(text, encoding="utf-8")
    if arguments.png is not None:
        plots.plot_panels(report.panels, arguments.png, title, report.panels_per_row)
    if arguments.html is not None:
        explorer = (
            None if prompt is None else html_report.make_explorer(model, tokenizer, prompt, **start)
        )
        html_report.write_html_report(
            arguments.html, title, report, explorer, arguments.command in IN_EXPLORER
        )
    for file in (arguments.png, arguments.html, arguments.json):
        if file not in (None, "-"):
            print(f"wrote {file}", file=sys.stderr)
    return 0
