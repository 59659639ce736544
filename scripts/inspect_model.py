"""Look inside a model: python scripts/inspect_model.py COMMAND MODEL [flags]."""

import argparse
import re
import shlex
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import Any

from thinker.runtime.cli import ArgumentParser, output_file, png_file
from thinker.runtime.errors import UserError, run_command

IN_EXPLORER = ("explain", "map", "attribute", "lens")  # what the HTML explorer shows too, so that the table is folded
VIEWS = {"attribute": "attribution", "lens": "lens"}  # the explorer opens another command's view: attention


def parse_arguments() -> argparse.Namespace:
    """The command line: one sub-parser per command, each with the flags that it reads."""
    shared = ArgumentParser(add_help=False)
    shared.add_argument("model", metavar="MODEL", help="a run, a checkpoint, a Hugging Face folder; explain: or JSON")
    shared.add_argument("--checkpoint", default="latest", help="of a run directory: latest, best, a step or a name")
    shared.add_argument("--device", default="auto", help="auto, cpu, cuda or mps")
    shared.add_argument("--json", nargs="?", const="-", metavar="FILE", help="JSON instead of the table, or in a file")
    shared.add_argument("--png", type=png_file, metavar="FILE", help="plot the report")
    shared.add_argument("--html", type=Path, metavar="FILE", help="write an HTML report; with a prompt, one to explore")
    prompt, optional_prompt, texts, target, position = (ArgumentParser(add_help=False) for _ in range(5))
    prompt.add_argument("--prompt", metavar="TEXT", required=True, help="what the model reads")
    optional_prompt.add_argument("--prompt", metavar="TEXT", help="what the model reads (default: random tokens)")
    texts.add_argument("--text", type=Path, metavar="FILE", help="to measure on (default: the run's validation text)")
    texts.add_argument("--texts", type=int, metavar="N", help="at most this many pieces of it (default 32)")
    target.add_argument("--target", metavar="TOKEN", help="text of one token (default: the likeliest next one)")
    target.add_argument("--contrast-token", metavar="TOKEN", help="another token, whose logit is subtracted")
    index = {"type": int, "metavar": "N", "help": "from 0, or from the end below 0 (default -1)"}
    position.add_argument("--position", default=-1, **index)

    parser = ArgumentParser(
        description="Shows what a model does with a text, from the inside.",
        epilog='example: %(prog)s attribute runs/quickstart --prompt "Once upon a" --png why.png',
    )
    defaults = {"prompt": None, "layer": 0, "head": 0, "position": -1, "target": None, "contrast_token": None}
    parser.set_defaults(**defaults, importance=None, over_training=False, out=None)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    def add_command(name: str, summary: str, *parents: ArgumentParser) -> ArgumentParser:
        return commands.add_parser(name, help=summary, description=summary, parents=[shared, *parents])

    explain = add_command("explain", "one attention row, number by number", optional_prompt)
    attention_map = add_command("map", "what each token attends to in one head", prompt)
    for command in (explain, attention_map):
        command.add_argument("--layer", type=int, default=0, metavar="N", help="from 0 (default 0)")
        command.add_argument("--head", type=int, default=0, metavar="N", help="from 0 (default 0)")
    explain.add_argument("--query", dest="position", default=-1, **index)
    heads = add_command("heads", "scores of all heads: entropy, distance, induction, ...", optional_prompt, texts)
    over = heads.add_mutually_exclusive_group()
    over.add_argument("--over-training", action="store_true", help="at every checkpoint that the run keeps")
    importance = {"choices": ("zero", "mean", "gradient"), "help": "loss without the head, or by its gradient"}
    over.add_argument("--importance", **importance)
    add_command("flow", "rollout and maximum flow from one position down to the tokens", prompt, position)
    add_command("attribute", "the tokens, heads and MLPs behind a prediction", prompt, target, position)
    add_command("lens", "what the model would predict after each layer", prompt, position)
    patch = add_command("patch", "which activation restores a prediction in another prompt", prompt, target)
    patch.add_argument("--corrupt", metavar="TEXT", required=True, help="a prompt of equal length, predicted otherwise")
    compare = add_command("compare", "two models, or two checkpoints of a run", optional_prompt)
    compare.add_argument("--other", metavar="MODEL", help="the second model (default: the same)")
    compare.add_argument("--other-checkpoint", metavar="NAME", help="of the second model (default latest)")
    prune = add_command("prune", "remove the least important heads for good", texts)
    prune.add_argument("--importance", **importance, default="zero")
    groups = prune.add_mutually_exclusive_group(required=True)
    groups.add_argument("--count", type=int, metavar="N", help="this many KV heads, each with its query heads")
    groups.add_argument("--groups", type=parse_groups, metavar="L.K,...", help="these KV heads, as layer.head")
    prune.add_argument("--out", type=Path, metavar="FOLDER", help="where the pruned model is written")
    arguments = parser.parse_args()
    parser.check_utf8(arguments, "prompt", "corrupt", "target", "contrast_token")
    check_arguments(arguments)
    return arguments


def parse_groups(text: str) -> list[tuple[int, int]]:
    """ "0.1,2.3" as pairs. Raises UserError."""
    if not re.fullmatch(r"\d+\.\d+(,\d+\.\d+)*", text):
        raise UserError(f"--groups {text} is not a list such as 0.1,2.3: layer and KV head, both from 0")
    groups = [(int(layer), int(group)) for layer, group in (pair.split(".") for pair in text.split(","))]
    if len(set(groups)) < len(groups):
        raise UserError(f"--groups {text} names a head twice; give each one once")
    return groups


def check_arguments(arguments: argparse.Namespace) -> None:
    """Refuse flags that contradict each other and files that cannot be written, before long work begins."""
    command = arguments.command
    if command == "explain":
        from thinker.interpretability.attention_row import check_arguments as check_vectors

        check_vectors(arguments)
    if command == "heads":
        if arguments.importance is None and (arguments.text is not None or arguments.texts is not None):
            raise UserError("--text and --texts are read with --importance; leave them out")
        if arguments.importance is not None and arguments.prompt is not None:
            raise UserError("importance is measured on many texts (--text FILE), not on a --prompt; leave it out")
        if arguments.over_training and arguments.checkpoint != "latest":
            raise UserError("--over-training takes every checkpoint; leave out --checkpoint")
    if command in ("heads", "prune") and arguments.texts is not None and arguments.texts < 2:
        raise UserError(f"--texts is {arguments.texts}; it must be at least 2")
    if arguments.target is not None and arguments.target == arguments.contrast_token:
        raise UserError(f"--target and --contrast-token are both {arguments.target!r}; give two tokens")
    if command == "compare" and arguments.other is None and arguments.other_checkpoint is None:
        raise UserError("compare needs a second model: --other MODEL, or --other-checkpoint NAME of the same")
    if arguments.out is not None and arguments.out.exists():
        raise UserError(f"--out {arguments.out} exists; give a new folder")
    named = [file for file in (arguments.png, arguments.html, arguments.json, arguments.out) if file not in (None, "-")]
    if len({output_file(file).absolute() for file in named}) < len(named):
        raise UserError(f"a file is named twice among {', '.join(map(str, named))}; each result needs one of its own")


def check_index(flag: str, index: int, size: int, from_end: bool = False) -> int:
    """A valid number of a layer, head or position. Raises UserError."""
    if not (-size if from_end else 0) <= index < size:
        raise UserError(f"--{flag} is {index}; there are {size}, counted from 0")
    return index


def encode_token(tokenizer: Any, flag: str, text: str | None) -> int | None:
    """The id of a token's text. Raises UserError where it is not exactly one token."""
    ids = [None] if text is None else tokenizer.encode(text, allow_special=True)
    if len(ids) != 1:
        parts = " ".join(repr(tokenizer.decode([i])) for i in ids)
        raise UserError(f"--{flag} {text!r} is {len(ids)} tokens of this model, {parts}; one is wanted, as in ' cat'")
    return ids[0]


def report_on_prompt(
    arguments: argparse.Namespace, model: Any, tokenizer: Any, prompt: Any
) -> tuple[Any, dict[str, Any]]:
    """The report of a command about one prompt, and what the HTML explorer of it opens with."""
    from thinker.interpretability import prompt_reports
    from thinker.interpretability.explain import explain
    from thinker.interpretability.reports import Prompt

    layer = check_index("layer", arguments.layer, len(model.blocks))
    head = check_index("head", arguments.head, model.blocks[layer].attention.n_heads)
    flag = "query" if arguments.command == "explain" else "position"
    position = check_index(flag, arguments.position, len(prompt.tokens), from_end=True)
    target = encode_token(tokenizer, "target", arguments.target)
    contrast_token = encode_token(tokenizer, "contrast-token", arguments.contrast_token)
    start = {"layer": layer, "head": head, "position": position, "view": VIEWS.get(arguments.command, "attention")}
    start |= {"target": target, "contrast_token": contrast_token}
    logit = target, contrast_token
    reports = {
        "explain": lambda: explain(model, prompt, layer, head, position),
        "map": lambda: prompt_reports.report_attention_map(model, prompt, layer, head),
        "flow": lambda: prompt_reports.report_flow(model, prompt, position),
        "attribute": lambda: prompt_reports.report_attribution(model, tokenizer, prompt, *logit, position),
        "lens": lambda: prompt_reports.report_logit_lens(model, tokenizer, prompt, position),
        "patch": lambda: prompt_reports.report_patching(
            model, tokenizer, prompt, Prompt.from_text(model, tokenizer, arguments.corrupt), *logit
        ),
    }
    return reports[arguments.command](), start


def report_on_heads(arguments: argparse.Namespace, folder: Path, model: Any, tokenizer: Any, prompt: Any) -> Any:
    """The report of heads, compare and prune."""
    from thinker import checkpoint
    from thinker.interop import load
    from thinker.interpretability import comparison, head_reports
    from thinker.training.training_data import sample_sequences, used_token_ids

    if arguments.importance is None:
        with tempfile.TemporaryDirectory() as scratch:
            ids = None if tokenizer is None else used_token_ids(folder, tokenizer, Path(scratch))
        origin = "the whole vocabulary" if ids is None else "those in the run's text"
        measured_on = prompt, head_reports.random_repeats(model, ids), origin
        if arguments.over_training:
            paths = checkpoint.list_checkpoints(Path(arguments.model) / "checkpoints")
            if len(paths) < 2:
                problem = f"{arguments.model} has {len(paths)} checkpoints"
                raise UserError(f"{problem}; --over-training needs a run with train.keep_every=N, which keeps more")
            steps = [(int(path.name.split("-")[1]), lambda path=path: load(path, model.device)[0]) for path in paths]
            return comparison.report_over_training(steps, *measured_on)
        if arguments.command == "heads":
            return head_reports.report_heads(model, *measured_on)
        path, name = arguments.other or arguments.model, arguments.other_checkpoint or "latest"
        other, other_tokenizer = load(path, model.device, name)
        text = arguments.prompt
        if text is not None and (other_tokenizer is None or other_tokenizer.encode(text) != tokenizer.encode(text)):
            raise UserError("the two models tokenize this prompt differently; leave it out, or compare others")
        names = f"{arguments.model} {arguments.checkpoint}", f"{path} {name}"
        return comparison.compare(model, other, *measured_on, names)
    with tempfile.TemporaryDirectory() as scratch:
        texts = sample_sequences(model, tokenizer, folder, arguments.text, arguments.texts or 32, Path(scratch))
    if arguments.command == "heads":
        return comparison.report_importance(model, texts, arguments.importance)
    pruned, report = comparison.report_pruning(model, texts, arguments.importance, arguments.count, arguments.groups)
    if arguments.out is None:
        print("nothing is written; --out FOLDER writes the smaller model", file=sys.stderr)
        return report
    checkpoint.save(arguments.out, pruned, {"step": 0})
    tokenizer.save(arguments.out)
    print(f"wrote {arguments.out}: python generate.py {shlex.quote(str(arguments.out))}", file=sys.stderr)
    return report


def make_report(arguments: argparse.Namespace) -> tuple[Any, dict[str, Any], Any, Any, Any]:
    """Load the model, if any. Returns the report, what the HTML explorer opens with, model, tokenizer and prompt."""
    if arguments.command == "explain" and arguments.prompt is None:
        from thinker.interpretability.attention_row import explain_vectors

        return explain_vectors(Path(arguments.model), arguments.position), {}, None, None, None
    from thinker.interop.load import find_model, load
    from thinker.interpretability.reports import Prompt
    from thinker.runtime.device import choose_device, configure_backend

    device = choose_device(arguments.device)
    configure_backend(device)
    folder = find_model(arguments.model, arguments.checkpoint)
    model, tokenizer = load(folder, device)
    if tokenizer is None and (arguments.prompt is not None or arguments.importance is not None):
        raise UserError(f"{arguments.model} has no tokenizer, so it cannot read a text")
    prompt = None if arguments.prompt is None else Prompt.from_text(model, tokenizer, arguments.prompt)
    if arguments.command in ("heads", "compare", "prune"):
        return report_on_heads(arguments, folder, model, tokenizer, prompt), {}, model, tokenizer, prompt
    return *report_on_prompt(arguments, model, tokenizer, prompt), model, tokenizer, prompt


def main() -> int:
    """Load the model, make the report, print and write it. Returns the exit status."""
    arguments = parse_arguments()
    from thinker.runtime.finite import finite_json

    report, start, model, tokenizer, prompt = make_report(arguments)
    text = finite_json(report.data)
    shown = "" if arguments.prompt is None else f" · {textwrap.shorten(arguments.prompt, 70, placeholder=' …')}"
    title = f"{arguments.model}: {arguments.command}{shown}"
    print(text if arguments.json == "-" else report.table())
    if arguments.json not in (None, "-"):
        Path(arguments.json).write_text(text, encoding="utf-8")
    if arguments.png is not None:
        from thinker.interpretability.plots import plot_panels

        plot_panels(report.panels, arguments.png, title, report.panels_per_row)
    if arguments.html is not None:
        from thinker.interpretability import html_report

        explorer = None if prompt is None else html_report.make_explorer(model, tokenizer, prompt, **start)
        html_report.write_html_report(arguments.html, title, report, explorer, arguments.command in IN_EXPLORER)
    for file in (arguments.png, arguments.html, arguments.json):
        if file not in (None, "-"):
            print(f"wrote {file}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    run_command(main)
