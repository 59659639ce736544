"""The command `thinker eval`: losses, long contexts and benchmark tasks."""

from __future__ import annotations

import argparse
import re
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thinker.evaluation.eval_flags import EvalFlags, Report, add_eval_flags
from thinker.runtime.cli import ArgumentParser
from thinker.runtime.errors import UserError, install_command
from thinker.runtime.plot_style import png_file

if TYPE_CHECKING:
    from thinker.api.evaluating import Text, TextChoice
    from thinker.data.tokenizers.tokenizer import Tokenizer
    from thinker.evaluation.long_context import PositionLosses
    from thinker.model import Thinker

EXAMPLES = (
    "runs/quickstart",
    "runs/quickstart --source text --path book.txt --context 128,512",
    "runs/quickstart --long --png long.png",
    "runs/quickstart --tasks hellaswag --limit 200",
    "runs/gpu-124m --fineweb fineweb_val_000000.bin",
)
SOURCES = ["tales", "pysource", "text", "jsonl", "parquet"]
TEXT_FLAGS = ("read_data", "source", "path", "column", "max_tokens", "rope_scaling", "png")
PLAIN_FLAGS = ("context", "stride", "confidence")
LONG_FLAGS = ("factor", "windows")
TASK_FLAGS = ("include", "shots", "limit")
LOWEST = {"factor": 1, "windows": 1, "max_tokens": 1, "stride": 1, "limit": 1, "shots": 0}
MAX_TOKENS = 200_000  # as in api.evaluating, which imports torch


def main() -> int:
    """Load the model, evaluate, print. Returns the exit status."""
    arguments, chosen = parse_arguments()
    from thinker.evaluation import long_context
    from thinker.interop import load
    from thinker.interop.find import find_model
    from thinker.runtime.backend import configure_backend
    from thinker.runtime.checks import finite_json
    from thinker.runtime.device import choose_device

    device = choose_device(arguments.device)
    configure_backend(device)
    folder = find_model(arguments.run, arguments.checkpoint)
    model, tokenizer = load(folder, device)
    if tokenizer is None:
        raise UserError(
            f"{folder} has no tokenizer, so it cannot read text; use a model saved with one"
        )
    if arguments.rope_scaling is not None:
        long_context.override_rope_scaling(model, arguments.rope_scaling)
    if chosen is not None:
        report = chosen.evaluate(arguments, model, tokenizer)
    elif arguments.fineweb is not None:
        report = evaluate_fineweb(arguments, folder, model, tokenizer)
    elif arguments.tasks is not None:
        report = evaluate_tasks(arguments, model, tokenizer)
    else:
        evaluate = evaluate_long if arguments.long else evaluate_text
        with tempfile.TemporaryDirectory() as scratch:
            report = evaluate(arguments, folder, model, tokenizer, Path(scratch))
    text = finite_json(report.values) if arguments.json else report.text
    print(text, flush=True)
    if arguments.png:
        report.draw()
    return 0


def parse_arguments() -> tuple[argparse.Namespace, EvalFlags | None]:
    """Parse the command line. Also returns the flags of a feature if they ask for its measurement.

    Raises UserError for flags that cannot be combined.
    """
    parser, features = make_parser()
    arguments = parser.parse_args()
    check_numbers(arguments)
    for feature in features:
        if feature.check(arguments, parser):
            return arguments, feature
    if arguments.fineweb is not None:
        unused = ("long", "part", "tasks", "stride", *set(TEXT_FLAGS) - {"max_tokens"})
        parser.check_unused(arguments, "with --fineweb", (*unused, *LONG_FLAGS, *TASK_FLAGS))
    elif arguments.tasks is not None:
        unused = ("long", *TEXT_FLAGS, *PLAIN_FLAGS, *LONG_FLAGS)
        parser.check_unused(arguments, "with --tasks", unused)
        names = [name.strip() for name in arguments.tasks.split(",")]
        arguments.tasks = [name for name in names if name]
        if not arguments.tasks:
            raise UserError("--tasks is empty; list at least one, such as hellaswag,arc_easy")
    elif arguments.long:
        parser.check_unused(arguments, "with --long", PLAIN_FLAGS + TASK_FLAGS)
    else:
        parser.check_unused(arguments, "without --long", LONG_FLAGS)
        parser.check_unused(arguments, "without --tasks", TASK_FLAGS)
    if arguments.long and arguments.max_tokens is not None and arguments.source is None:
        raise UserError(
            "--max-tokens has no effect with --long unless --source is set; use --windows instead"
        )
    if arguments.include is not None and not arguments.include.is_dir():
        raise UserError(
            f"--include {arguments.include} is not a folder; use a folder of YAML tasks"
        )
    if arguments.source is not None:
        when = "with --source: it is for the run's own data"
        parser.check_unused(arguments, when, ("read_data", "part"))
    needs_path = arguments.source in ("text", "jsonl", "parquet")
    if needs_path != (arguments.path is not None):
        raise UserError(
            "--source text, jsonl or parquet needs --path FILE, and --path needs one of these "
            "sources"
        )
    return arguments, None


def check_numbers(arguments: argparse.Namespace) -> None:
    """Raise UserError for a number that is out of range."""
    for name, lowest in LOWEST.items():
        value = getattr(arguments, name)
        if value is not None and value < lowest:
            flag = name.replace("_", "-")
            raise UserError(f"--{flag} is {value}; use at least {lowest}")
    confidence = arguments.confidence
    if not 0 < confidence <= 0.9999:
        raise UserError(
            f"--confidence is {confidence}; use a value above 0 and up to 0.9999, such as 0.95"
        )


def make_parser() -> tuple[ArgumentParser, list[EvalFlags]]:
    """The parser, with its flags by group, and those of features."""
    parser = ArgumentParser(
        description="Evaluate a model: loss, perplexity, bits per byte, long contexts and "
        "benchmark tasks.",
        examples=EXAMPLES,
    )
    parser.add_model("run", "PATH")

    add = parser.add_argument_group("text").add_argument
    source_help = "text to evaluate on (default: the run's validation split)"
    add("--source", choices=SOURCES, help=source_help)
    read_help = (
        "read files named in the run's config if the token cache lacks them; use only "
        "with trusted configs"
    )
    add("--read-data", action="store_true", help=read_help)
    part_help = "evaluate on one source of a mixture (default: all tokens)"
    add("--part", metavar="NAME", help=part_help)
    path_help = "file, folder or glob for text, jsonl and parquet"
    add("--path", metavar="FILE", help=path_help)
    column_help = "text column of jsonl and parquet (default: text)"
    add("--column", metavar="NAME", help=column_help)
    fineweb_help = (
        "evaluate on the first 10,485,760 tokens of FineWeb's validation tokens "
        "(fineweb_val_000000.bin), as replications of GPT-2 do"
    )
    add("--fineweb", metavar="FILE", help=fineweb_help)
    tokens_help = f"maximum number of tokens (default: {MAX_TOKENS} with --source)"
    add("--max-tokens", type=int, help=tokens_help)

    add = parser.add_argument_group("evaluation").add_argument
    context_help = "context lengths, such as 128,256 (default: the trained length)"
    add("--context", type=context_lengths, metavar="N,...", help=context_help)
    default = "half the context for --source text with a single file, otherwise the whole window"
    stride_help = f"score only the last N tokens of each window (default: {default})"
    add("--stride", type=int, help=stride_help)
    confidence_help = "confidence level of the intervals"
    add("--confidence", type=float, default=0.95, metavar="P", help=confidence_help)
    rope_help = 'RoPE scaling, such as "{type: linear, factor: 4}"'
    add("--rope-scaling", metavar="YAML", help=rope_help)
    add("--device", default="auto", help="auto, cpu, cuda or mps")

    add = parser.add_argument_group("long context").add_argument
    long_help = "loss by position beyond the trained length, and a needle test on tales"
    add("--long", action="store_true", help=long_help)
    factor_help = "evaluate up to N times the trained length"
    add("--factor", type=int, default=4, help=factor_help)
    add("--windows", type=int, default=32, help="maximum number of windows")

    install = install_command("eval")
    title = f"benchmark tasks (EleutherAI's lm-evaluation-harness; {install})"
    add = parser.add_argument_group(title).add_argument
    tasks_help = "tasks, such as hellaswag,arc_easy; downloads their data"
    add("--tasks", metavar="NAME,...", help=tasks_help)
    include_help = "folder of custom tasks in YAML"
    add("--include", type=Path, metavar="FOLDER", help=include_help)
    shots_help = "few-shot examples per question (default: set by the task)"
    add("--shots", type=int, help=shots_help)
    limit_help = "maximum number of questions per task (default: all), or of prompts (default: 100)"
    add("--limit", type=int, help=limit_help)

    features = add_eval_flags(parser)

    add = parser.add_argument_group("output").add_argument
    add("--json", action="store_true", help="print one JSON object instead of tables")
    add("--png", type=png_file, metavar="FILE", help="plot the loss by position")
    return parser, features


def context_lengths(text: str) -> list[int]:
    """Parse "128,256". Raises UserError for anything else."""
    is_list = re.fullmatch(r"\d+(,\d+)*", text) is not None
    lengths = [int(part) for part in text.split(",")] if is_list else []
    if not lengths or min(lengths) < 2:
        raise UserError(
            f"--context {text} is not a list of lengths; use numbers of at least 2, such as 128,256"
        )
    return lengths


def text_choice(arguments: argparse.Namespace) -> TextChoice:
    """The text that the flags choose."""
    from thinker.api.evaluating import TextChoice

    names = ("source", "path", "column", "max_tokens", "part", "read_data")
    return TextChoice(**{name: getattr(arguments, name) for name in names})


def plot(
    loss: PositionLosses, needles: list[dict[str, Any]], arguments: argparse.Namespace, source: str
) -> None:
    """Plot loss by position, one point per eighth of the trained length, and needle accuracy by
    distance."""
    from thinker.runtime.plot_style import BLUE, GREY, new_figure, plain_text, save_figure

    width, n_panels = (11, 2) if needles else (6, 1)
    figure, panels = new_figure(width, 4.2, n_panels, share=False)
    length, T = loss.trained_length, loss.nats.shape[1]
    step = max(1, length // 8)
    parts = [loss.segment(start, min(start + step, T)) for start in range(0, T, step)]
    min_tokens = max(part.n_tokens for part in parts) / 100  # means over fewer tokens are noisy
    points = []
    for part in parts:
        if part.n_tokens >= min_tokens:
            points.append(((part.start + part.end) / 2, part.loss, part.error or 0))
    panels[0].errorbar(*zip(*points), color=BLUE, marker="o", markersize=3)
    panels[0].set(xlabel="position", ylabel="loss (nats per token)")
    reachable = [result for result in needles if "accuracy" in result]
    if reachable:
        plot_needles(panels[1], reachable)
    for axes in panels:
        axes.axvline(length, color=GREY, linestyle="--", label=f"trained length ({length})")
        axes.legend(frameon=False)
    title = f"{arguments.run} on {arguments.path or source}"
    figure.suptitle(plain_text(title), fontsize=10)
    save_figure(figure, arguments.png)


def plot_needles(axes: Any, results: list[dict[str, Any]]) -> None:
    """Plot the accuracy of a needle test by distance."""
    from thinker.runtime.plot_style import GREY, ORANGE

    columns = {}
    for name in ("distance", "accuracy", "error", "chance"):
        columns[name] = [result[name] for result in results]
    distances = columns["distance"]
    axes.errorbar(
        distances, columns["accuracy"], columns["error"], color=ORANGE, marker="o", markersize=3
    )
    axes.set_xscale("log", base=2)
    axes.set_xticks(distances, [str(distance) for distance in distances])
    axes.plot(distances, columns["chance"], color=GREY, linestyle=":", label="chance")
    axes.set(xlabel="tokens since the fact", ylabel="needle accuracy", ylim=(-0.03, 1.03))


def format_header(header: dict[str, Any]) -> str:
    """Format the header of a report, one line per entry that is not None."""
    lines = []
    for name, value in header.items():
        if value is not None:
            lines.append(f"{name.replace('_', ' '):>15}  {value}")
    return "\n".join(lines)


def evaluate_text(
    arguments: argparse.Namespace, folder: Path, model: Thinker, tokenizer: Tokenizer, scratch: Path
) -> Report:
    """Measure loss, perplexity and bits per byte by context length."""
    from thinker.api.evaluating import measure_text, open_text
    from thinker.evaluation.perplexity import format_table

    choice = text_choice(arguments)
    text = open_text(choice, folder, tokenizer, scratch)
    confidence = arguments.confidence
    measured = measure_text(
        model, tokenizer, text, choice, arguments.context or (), arguments.stride, confidence
    )
    losses, trained, has_halves, is_part, lost = measured
    first, last = losses[0], losses[-1]
    part = f"the beginning ({first.n_tokens:,} tokens counted; see --max-tokens)"
    header = {
        "model": str(folder),
        "source": text.source,
        "path": arguments.path,
        "trained_length": trained,
        "part": part if is_part else None,
        "counted": describe_counted(text),
        "stride": arguments.stride,
        "rope_scaling": arguments.rope_scaling,
        "confidence": confidence,
    }
    values = header | {"losses": [loss.to_dict() for loss in losses], "lost_targets": lost}
    header["confidence"] = f"{confidence:.4g}, for the [intervals]"
    header["bytes"] = f"{first.n_bytes:,}"
    if has_halves:
        header["stride"] = "half the context, as in thinker generate --score"
    if first.entropy_floor is not None:
        floor = f"{first.entropy_floor:.4f} nats per token"
        header["entropy_floor"] = f"{floor} (the lowest possible loss)"
    by_position = (
        f"loss by position, context {last.context_length}\n{last.by_position.format_table()}"
    )
    table = "\n".join([format_table(losses), *lost])
    shown = f"{format_header(header)}\n\n{table}\n\n{by_position}"
    draw = partial(plot, last.by_position, [], arguments, text.source)
    return Report(values, shown, draw)


def evaluate_fineweb(
    arguments: argparse.Namespace, folder: Path, model: Thinker, tokenizer: Tokenizer
) -> Report:
    """Measure the loss on FineWeb's validation tokens, and compare it with GPT-2's."""
    from thinker.evaluation import fineweb
    from thinker.evaluation.perplexity import format_table

    lengths = arguments.context or [min(fineweb.CONTEXT, model.config.max_seq_len)]
    n_tokens = arguments.max_tokens or fineweb.VAL_TOKENS
    losses = []
    lines = []
    for length in lengths:
        loss = fineweb.fineweb_loss(
            model, tokenizer, arguments.fineweb, length, n_tokens, arguments.confidence
        )
        losses.append(loss)
        lines.append(fineweb.compare(loss))
    header = {"model": str(folder), "file": arguments.fineweb, "confidence": arguments.confidence}
    values = header | {"losses": [loss.to_dict() for loss in losses], "gpt2": fineweb.GPT2_LOSS}
    shown = "\n".join([format_header(header), "", format_table(losses), "", *lines])
    return Report(values, shown, None)


def describe_counted(text: Text) -> str:
    """Which tokens the loss counts."""
    if text.is_one:
        return "all tokens, without an end-of-text token"
    if any(shard.loss_mask is None for shard in text.tokens.shards):
        return "all tokens, including the end of each document"
    return "answers"


def evaluate_long(
    arguments: argparse.Namespace, folder: Path, model: Thinker, tokenizer: Tokenizer, scratch: Path
) -> Report:
    """Measure loss by position beyond the trained length and, on tales, run the needle test."""
    from thinker.api.evaluating import open_text
    from thinker.evaluation import long_context, needle

    text = open_text(text_choice(arguments), folder, tokenizer, scratch)
    trained = text.trained or model.config.max_seq_len
    longest = arguments.factor * trained
    windows = long_context.long_windows(model.config, text.tokens, longest)
    window_len = windows.seq_len
    rows = max(1, 4096 // window_len)
    loss = long_context.loss_by_position(model, windows, rows, arguments.windows, trained)
    needles = []
    if text.source == "tales":
        max_distance = min(longest, 1 << 14)  # longer stories take minutes
        for n in range(4, max_distance.bit_length()):
            needles.append(needle.needle_test(model, tokenizer, 2**n))
    header = {
        "checkpoint": str(folder),
        "trained_length": loss.trained_length,
        "rope_scaling": arguments.rope_scaling,
        "source": text.source,
        "window_length": window_len,
        "windows": len(loss.nats),
        "tokens": int(loss.counts.sum()),
    }
    shown = format_header(header)
    if window_len < longest:
        reason = "the text is shorter"
        if model.config.positions == "learned" and window_len == model.config.max_seq_len:
            reason = f"the model has {window_len} learned positions"
        shown += f"\nwindows have {window_len} tokens instead of {longest}: {reason}"
    found = "skipped the needle test, which needs --source tales"
    if needles:
        found = needle.format_table(needles)
    values = header | {"long": loss.to_dict(), "needle": needles or None}
    draw = partial(plot, loss, needles, arguments, text.source)
    return Report(values, f"{shown}\n\n{loss.format_table()}\n\n{found}", draw)


def evaluate_tasks(arguments: argparse.Namespace, model: Thinker, tokenizer: Tokenizer) -> Report:
    """Run the harness. The text has one line per metric."""
    try:
        from thinker.evaluation.lm_eval_harness import run_tasks
    except ModuleNotFoundError as error:
        remedy = f"run {install_command('eval')}"
        raise UserError(f"--tasks needs the {error.name} package; {remedy}") from error
    results = run_tasks(
        model, tokenizer, arguments.tasks, arguments.include, arguments.shots, arguments.limit
    )
    lines = [f"{'task':>24}  {'metric':>18}  {'value':>8}  {'std error':>9}  {'questions':>9}"]
    for task, metrics in results.items():
        questions = metrics.get("questions", "")
        for metric, value in metrics.items():
            if metric.endswith("_stderr") or metric == "questions":
                continue
            error = metrics.get(f"{metric}_stderr")
            shown = "" if error is None else f"{error:.4f}"
            lines.append(f"{task:>24}  {metric:>18}  {value:8.4f}  {shown:>9}  {questions:>9}")
    return Report(results, "\n".join(lines), None)
