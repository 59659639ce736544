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
ONCE = '--prompt "Once upon a time"'
GOAT = '--prompt "Noah has a goat. Noah has a"'
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
    """Parse the command line, with one subparser per report."""
    description = "Inspect what a model computes: attention, attribution, heads, pruning."
    examples = (f"attribute runs/quickstart {ONCE} --png why.png", "COMMAND --help")
    parser = ArgumentParser(description=description, examples=examples)
    parser.set_defaults(prompt=None, layer=0, head=0, position=-1, target=None, contrast_token=None)
    parser.set_defaults(importance=None, over_training=False, out=None)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    add_explain(commands)
    add_map(commands)
    add_heads(commands)
    add_content(commands)
    add_flow(commands)
    add_attribute(commands)
    add_lens(commands)
    add_patch(commands)
    add_compare(commands)
    add_prune(commands)
    arguments = parser.parse_args()
    parser.check_utf8(arguments, "prompt", "corrupt", "target", "contrast_token")
    check_arguments(arguments)
    return arguments


def add_report(commands: Any, name: str, summary: str, *examples: str) -> ArgumentParser:
    """A subparser with the model and the output, which all reports have."""
    lines = [f"runs/quickstart {example}" for example in examples]
    report = commands.add_parser(name, help=summary, description=summary, examples=lines)
    alternative = ""
    if name == "explain":
        alternative = ", or a JSON file with vectors q, k and v"
    report.add_model("model", "MODEL", alternative)
    report.add_argument("--device", default="auto", help="auto, cpu, cuda or mps")
    group = report.add_argument_group("output")
    json_help = "print JSON, or write it to FILE"
    group.add_argument("--json", nargs="?", const="-", metavar="FILE", help=json_help)
    group.add_argument("--png", type=png_file, metavar="FILE", help="plot the report")
    html_help = "write an HTML report"
    if name not in ("prune", "content"):
        html_help += " (interactive with --prompt)"
    group.add_argument("--html", type=Path, metavar="FILE", help=html_help)
    return report


def add_prompt(report: ArgumentParser, remark: str = "", required: bool = False) -> None:
    """Flag for the text to run the model on."""
    prompt_help = f"text to run the model on{remark}"
    report.add_argument("--prompt", metavar="TEXT", required=required, help=prompt_help)


def add_texts(report: ArgumentParser, when: str = "") -> None:
    """Flags for the texts on which heads are measured."""
    text_help = f"{when}text to measure on (default: validation split)"
    report.add_argument("--text", type=Path, metavar="FILE", help=text_help)
    texts_help = f"{when}maximum number of sequences (default: 32)"
    report.add_argument("--texts", type=int, help=texts_help)


def add_head(report: ArgumentParser, default: int | None = 0, remark: str = "") -> None:
    """Flags for a head."""
    layer_help = f"layer, counted from 0{remark}"
    report.add_argument("--layer", type=int, default=default, help=layer_help)
    head_help = f"head, counted from 0{remark}"
    report.add_argument("--head", type=int, default=default, help=head_help)


def add_position(report: ArgumentParser, flag: str = "--position") -> None:
    """Flag for a position."""
    position_help = "position in the prompt; negative counts from the end"
    report.add_argument(flag, dest="position", type=int, default=-1, help=position_help)


def add_target(report: ArgumentParser) -> None:
    """Flags for the predicted token."""
    target_help = "predicted token (default: the most likely next token)"
    report.add_argument("--target", metavar="TOKEN", help=target_help)
    contrast_help = "token whose logit is subtracted from the target's (default: none)"
    report.add_argument("--contrast-token", metavar="TOKEN", help=contrast_help)


def add_importance(report: Any, default: str | None = None) -> None:
    """Flag for how heads are ranked."""
    methods = ("zero", "mean", "gradient")
    importance_help = "rank heads by loss when ablated, or by gradient"
    report.add_argument("--importance", choices=methods, default=default, help=importance_help)


def add_explain(commands: Any) -> None:
    """One attention row."""
    examples = (f"{ONCE} --layer 0 --head 3", f"{ONCE} --query 2 --png row.png")
    report = add_report(commands, "explain", "compute one attention row step by step", *examples)
    add_prompt(report, "; omit if MODEL is JSON")
    add_head(report)
    add_position(report, "--query")


def add_map(commands: Any) -> None:
    """The attention of one head."""
    examples = (f"{ONCE} --html page.html", f"{ONCE} --layer 0 --head 3")
    report = add_report(commands, "map", "show what each token attends to in one head", *examples)
    add_prompt(report, required=True)
    remark = " (default: that of the head which the likeliest next token needs most)"
    add_head(report, None, remark)


def add_heads(commands: Any) -> None:
    """Scores of all heads."""
    summary = "score all heads: entropy, distance, induction, importance"
    examples = (f"{ONCE} --png heads.png", "--importance zero --texts 64")
    report = add_report(commands, "heads", summary, *examples)
    add_prompt(report, " (default: random tokens)")
    add_texts(report, "with --importance: ")
    over = report.add_mutually_exclusive_group()
    over_help = "score the heads of every checkpoint of the run"
    over.add_argument("--over-training", action="store_true", help=over_help)
    add_importance(over)


def add_content(commands: Any) -> None:
    """What heads attend to in tales."""
    summary = "score all heads on tales: facts, subjects, word classes"
    report = add_report(commands, "content", summary, "--png content.png")
    stories_help = "number of new stories, on which no run was trained"
    report.add_argument("--stories", type=int, default=32, help=stories_help)


def add_flow(commands: Any) -> None:
    """Attention through the layers."""
    summary = "trace attention from a position to the tokens: rollout, maximum flow"
    report = add_report(commands, "flow", summary, ONCE, f"{ONCE} --position 3 --png flow.png")
    add_prompt(report, required=True)
    add_position(report)


def add_attribute(commands: Any) -> None:
    """What a prediction is made of."""
    summary = "attribute a prediction to tokens, heads and MLPs"
    contrast = f'{GOAT} --contrast-token " pony" --png why.png'
    report = add_report(commands, "attribute", summary, ONCE, contrast)
    add_prompt(report, required=True)
    add_target(report)
    add_position(report)


def add_lens(commands: Any) -> None:
    """The prediction after each layer."""
    summary = "show what the model would predict after each layer"
    report = add_report(commands, "lens", summary, ONCE, f"{ONCE} --position 3 --png lens.png")
    add_prompt(report, required=True)
    add_position(report)


def add_patch(commands: Any) -> None:
    """Activations of one prompt in another."""
    summary = "find activations that restore a prediction in another prompt"
    prompts = f'{GOAT} --corrupt "Noah has a pony. Noah has a"'
    report = add_report(commands, "patch", summary, prompts, f"{prompts} --png patch.png")
    add_prompt(report, required=True)
    add_target(report)
    corrupt_help = "prompt with the same number of tokens but a different prediction"
    report.add_argument("--corrupt", metavar="TEXT", required=True, help=corrupt_help)


def add_compare(commands: Any) -> None:
    """Two models."""
    summary = "compare two models, or two checkpoints of a run"
    examples = ("--other runs/pruned", "--other-checkpoint best")
    report = add_report(commands, "compare", summary, *examples)
    add_prompt(report, " (default: random tokens)")
    report.add_argument("--other", metavar="MODEL", help="second model (default: MODEL)")
    checkpoint_help = "checkpoint of the second model (default: latest)"
    report.add_argument("--other-checkpoint", metavar="NAME", help=checkpoint_help)


def add_prune(commands: Any) -> None:
    """A model without some of its heads."""
    examples = ("--count 2 --out runs/pruned", "--groups 0.1,2.3 --out runs/pruned")
    report = add_report(commands, "prune", "remove heads from a model permanently", *examples)
    add_texts(report)
    add_importance(report, "zero")
    groups = report.add_mutually_exclusive_group(required=True)
    count_help = "remove the N least important KV heads with their query heads"
    groups.add_argument("--count", type=int, help=count_help)
    groups_help = "KV heads to remove, as LAYER.KV_HEAD"
    groups.add_argument("--groups", type=parse_groups, metavar="L.K,...", help=groups_help)
    out_help = "folder for the pruned model (default: not saved)"
    report.add_argument("--out", type=Path, metavar="FOLDER", help=out_help)


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
    options = {name: getattr(arguments, name) for name in OPTIONS[command]}
    if command == "explain":
        options["query"] = arguments.position
    report = inspecting.REPORTS[command](model, tokenizer, prompt, **options)
    tokens = inspecting.encode_targets(tokenizer, arguments.target, arguments.contrast_token)
    shown = arguments.layer, arguments.head
    if command == "map":  # which may have chosen them
        shown = report.data["layer"], report.data["head"]
    start = {
        "layer": shown[0],
        "head": shown[1],
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
