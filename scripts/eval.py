"""Evaluate a model: python scripts/eval.py PATH."""

import argparse
import re
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from thinker.runtime.cli import ArgumentParser, png_file
from thinker.runtime.errors import UserError, run_command

TEXT_FLAGS = ("read_data", "source", "path", "column", "max_tokens", "rope_scaling", "png")
PLAIN_FLAGS = ("context", "stride", "confidence")
LONG_FLAGS = ("factor", "windows")
TASK_FLAGS = ("include", "shots", "limit")
MAX_TOKENS = 200_000


def parse_arguments() -> argparse.Namespace:
    """Parse the command line. Raises UserError for flags that cannot be combined."""
    examples = ("runs/quickstart", "runs/quickstart --source text --path book.txt --context 128,512",
                "runs/quickstart --long --png long.png", "runs/quickstart --tasks hellaswag --limit 200")  # fmt: skip
    description = (
        "Evaluate a model: loss, perplexity, bits per byte, long contexts and benchmark tasks."
    )
    parser = ArgumentParser(description=description, examples=examples)
    parser.add_model("run", "PATH")
    group = parser.add_argument_group("text")
    sources = ["tales", "pysource", "text", "jsonl", "parquet"]
    group.add_argument(
        "--source",
        choices=sources,
        help="text to evaluate on (default: the run's validation split)",
    )
    read_help = "read files named in the run's config if the token cache lacks them; use only with trusted configs"
    group.add_argument("--read-data", action="store_true", help=read_help)
    group.add_argument(
        "--part", metavar="NAME", help="evaluate on one source of a mixture (default: all tokens)"
    )
    group.add_argument(
        "--path", metavar="FILE", help="file, folder or glob for text, jsonl and parquet"
    )
    group.add_argument(
        "--column", metavar="NAME", help="text column of jsonl and parquet (default: text)"
    )
    group.add_argument(
        "--max-tokens",
        type=int,
        help=f"maximum number of tokens (default: {MAX_TOKENS} with --source)",
    )
    group = parser.add_argument_group("evaluation")
    context = {"type": context_lengths, "metavar": "N,..."}
    group.add_argument(
        "--context",
        **context,
        help="context lengths, such as 128,256 (default: the trained length)",
    )
    default = "half the context for --source text with a single file, otherwise the whole window"
    group.add_argument(
        "--stride",
        type=int,
        help=f"score only the last N tokens of each window (default: {default})",
    )
    group.add_argument(
        "--confidence",
        type=float,
        default=0.95,
        metavar="P",
        help="confidence level of the intervals",
    )
    group.add_argument(
        "--rope-scaling", metavar="YAML", help='RoPE scaling, such as "{type: linear, factor: 4}"'
    )
    group.add_argument("--device", default="auto", help="auto, cpu, cuda or mps")
    group = parser.add_argument_group("long context")
    long_help = "loss by position beyond the trained length, and a needle test on tales"
    group.add_argument("--long", action="store_true", help=long_help)
    group.add_argument(
        "--factor", type=int, default=4, help="evaluate up to N times the trained length"
    )
    group.add_argument("--windows", type=int, default=32, help="maximum number of windows")
    group = parser.add_argument_group(
        "benchmark tasks (EleutherAI's lm-evaluation-harness; pip install lm-eval)"
    )
    group.add_argument(
        "--tasks",
        metavar="NAME,...",
        help="tasks, such as hellaswag,arc_easy; downloads their data",
    )
    group.add_argument(
        "--include", type=Path, metavar="FOLDER", help="folder of custom tasks in YAML"
    )
    group.add_argument(
        "--shots", type=int, help="few-shot examples per question (default: set by the task)"
    )
    group.add_argument(
        "--limit", type=int, help="maximum number of questions per task (default: all)"
    )
    group = parser.add_argument_group("output")
    group.add_argument(
        "--json", action="store_true", help="print one JSON object instead of tables"
    )
    group.add_argument("--png", type=png_file, metavar="FILE", help="plot the loss by position")
    arguments = parser.parse_args()
    if arguments.tasks is not None:
        parser.check_unused(
            arguments, "with --tasks", ("long", *TEXT_FLAGS, *PLAIN_FLAGS, *LONG_FLAGS)
        )
        arguments.tasks = [name.strip() for name in arguments.tasks.split(",") if name.strip()]
        if not arguments.tasks:
            raise UserError("--tasks is empty; list at least one, such as hellaswag,arc_easy")
    elif arguments.long:
        parser.check_unused(arguments, "with --long", PLAIN_FLAGS + TASK_FLAGS)
    else:
        parser.check_unused(arguments, "without --long", LONG_FLAGS)
        parser.check_unused(arguments, "without --tasks", TASK_FLAGS)
    for name, lowest in {
        "factor": 1,
        "windows": 1,
        "max_tokens": 1,
        "stride": 1,
        "limit": 1,
        "shots": 0,
    }.items():
        if getattr(arguments, name) is not None and getattr(arguments, name) < lowest:
            raise UserError(
                f"--{name.replace('_', '-')} is {getattr(arguments, name)}; use at least {lowest}"
            )
    if not 0 < arguments.confidence <= 0.9999:
        raise UserError(
            f"--confidence is {arguments.confidence}; use a value above 0 and up to 0.9999, such as 0.95"
        )
    if arguments.long and arguments.max_tokens is not None and arguments.source is None:
        raise UserError(
            "--max-tokens has no effect with --long unless --source is set; use --windows instead"
        )
    if arguments.include is not None and not arguments.include.is_dir():
        raise UserError(
            f"--include {arguments.include} is not a folder; use a folder of YAML tasks"
        )
    if arguments.source is not None:
        parser.check_unused(
            arguments, "with --source: it is for the run's own data", ("read_data", "part")
        )
    if (arguments.path is not None) != (arguments.source in ("text", "jsonl", "parquet")):
        raise UserError(
            "--source text, jsonl or parquet needs --path FILE, and --path needs one of these sources"
        )
    return arguments


def context_lengths(text: str) -> list[int]:
    """Parse "128,256". Raises UserError for anything else."""
    lengths = [int(part) for part in text.split(",")] if re.fullmatch(r"\d+(,\d+)*", text) else [0]
    if min(lengths) < 2:
        raise UserError(
            f"--context {text} is not a list of lengths; use numbers of at least 2, such as 128,256"
        )
    return lengths


def load_tokens(
    arguments: argparse.Namespace, folder: Path, tokenizer: Any, scratch: Path
) -> tuple:
    """Source name, trained length or None, layout of windows, whether the source is one text, and its tokens."""
    from thinker.data.text.sources import open_source
    from thinker.evaluation.perplexity import tokenize
    from thinker.training.run_data import load_run_config, load_validation_data

    if arguments.source is not None:
        options = {"column": arguments.column} if arguments.column else {}
        max_tokens = arguments.max_tokens or MAX_TOKENS
        if arguments.source == "tales":  # a seed of stories that no run trains on
            options |= {"max_documents": 1 + max_tokens // 16, "seed": 1 << 40}
        source = open_source(arguments.source, path=arguments.path, **options)
        layout, config = (
            {"packing": "documents" if source.name == "tales" else "contiguous"},
            load_run_config(folder),
        )
        tokens = tokenize(source, tokenizer, max_tokens, scratch)
        return source.name, config and config.data.seq_len, layout, source.whole_text, tokens
    part, read_data = arguments.part, arguments.read_data
    config, tokens = load_validation_data(folder, tokenizer, "--source", scratch, read_data, part)
    names = ", ".join(source.label for source in config.data.sources or ())
    source = (
        config.data.source
        or part
        or f"all tokens of {names}, not weighted; --part NAME for one of them"
    )
    layout = {"packing": config.data.val_packing, "document_masking": config.data.document_masking}
    return source, config.data.seq_len, layout, False, tokens


def plot(loss: Any, needles: list[dict[str, Any]], path: Path, title: str) -> None:
    """Plot loss by position, one point per eighth of the trained length, and needle accuracy by distance."""
    from thinker.runtime.plot_style import BLUE, GREY, ORANGE, new_figure, plain_text, save_figure

    figure, panels = new_figure(11 if needles else 6, 4.2, 2 if needles else 1, share=False)
    length, T = loss.trained_length, loss.nats.shape[1]
    step = max(1, length // 8)
    parts = [loss.segment(start, min(start + step, T)) for start in range(0, T, step)]
    min_tokens = max(part.n_tokens for part in parts) / 100  # means over fewer tokens are noisy
    points = [
        ((p.start + p.end) / 2, p.loss, p.error or 0) for p in parts if p.n_tokens >= min_tokens
    ]
    panels[0].errorbar(*zip(*points), color=BLUE, marker="o", markersize=3)
    panels[0].set(xlabel="position", ylabel="loss (nats per token)")
    reachable = [result for result in needles if "accuracy" in result]
    if reachable:
        names = ("distance", "accuracy", "error", "chance")
        distances, accuracies, errors, chances = (
            [result[name] for result in reachable] for name in names
        )
        panels[1].errorbar(distances, accuracies, errors, color=ORANGE, marker="o", markersize=3)
        panels[1].set_xscale("log", base=2)
        panels[1].set_xticks(distances, [str(distance) for distance in distances])
        panels[1].plot(distances, chances, color=GREY, linestyle=":", label="chance")
        panels[1].set(xlabel="tokens since the fact", ylabel="needle accuracy", ylim=(-0.03, 1.03))
    for axes in panels:
        axes.axvline(length, color=GREY, linestyle="--", label=f"trained length ({length})")
        axes.legend(frameon=False)
    figure.suptitle(plain_text(title), fontsize=10)
    save_figure(figure, path)


def format_header(header: dict[str, Any]) -> str:
    """Format the header of a report, one line per entry that is not None."""
    return "\n".join(
        f"{name.replace('_', ' '):>15}  {value}"
        for name, value in header.items()
        if value is not None
    )


def evaluate_text(
    arguments: argparse.Namespace, folder: Path, model: Any, tokenizer: Any, scratch: Path
) -> tuple:
    """Measure loss, perplexity and bits per byte by context length: values for JSON, a text, a function that plots."""
    from thinker.data.batches.batches import PackedDataset
    from thinker.data.tokenizers.text_bytes import scaled_byte_lengths
    from thinker.evaluation.perplexity import format_table, text_loss

    source, trained, layout, is_one_text, tokens = load_tokens(
        arguments, folder, tokenizer, scratch
    )
    trained = trained or min(model.config.max_seq_len, 1024)
    longest = max(shard.n_tokens - 1 for shard in tokens.shards)
    lengths = arguments.context or [min(trained, longest)]
    if max(lengths) > longest:
        raise UserError(
            f"--context is {max(lengths)}, longer than the text ({longest} tokens); use at most {longest}"
        )
    prefix = model.config.prefix
    halves = is_one_text and arguments.stride is None and prefix <= 1  # as Generator.score() does
    strides = [length - length // 2 if halves else arguments.stride for length in lengths]
    windows = [
        PackedDataset(tokens, T, **layout, stride=n, prefix_len=prefix)
        for T, n in zip(lengths, strides)
    ]
    byte_lengths, confidence = scaled_byte_lengths(tokens, tokenizer), arguments.confidence
    max_tokens = arguments.max_tokens or MAX_TOKENS
    is_part = tokens.n_tokens > max_tokens and (arguments.source or arguments.max_tokens)
    limits = [
        -(-max_tokens // each.stride) if is_part and arguments.source is None else 0
        for each in windows
    ]
    losses = [
        text_loss(model, each, byte_lengths, confidence, trained, n)
        for each, n in zip(windows, limits)
    ]
    draw = partial(
        plot,
        losses[-1].by_position,
        [],
        arguments.png,
        f"{arguments.run} on {arguments.path or source}",
    )
    header = {
        "model": str(folder),
        "source": source,
        "path": arguments.path,
        "trained_length": trained,
    }
    header["part"] = (
        f"the beginning ({losses[0].n_tokens:,} tokens counted; see --max-tokens)"
        if is_part
        else None
    )
    has_text = any(shard.loss_mask is None for shard in tokens.shards)
    answers_or_all = "all tokens, including the end of each document" if has_text else "answers"
    header["counted"] = (
        "all tokens, without an end-of-text token" if is_one_text else answers_or_all
    )
    header |= {
        "stride": arguments.stride,
        "rope_scaling": arguments.rope_scaling,
        "confidence": confidence,
    }
    values = header | {"losses": [loss.to_dict() for loss in losses]}
    header |= {
        "confidence": f"{confidence:.4g}, for the [intervals]",
        "bytes": f"{losses[0].n_bytes:,}",
    }
    header["stride"] = "half the context, as in generate.py --score" if halves else arguments.stride
    if losses[0].entropy_floor is not None:
        header["entropy_floor"] = (
            f"{losses[0].entropy_floor:.4f} nats per token (the lowest possible loss)"
        )
    by_position = (
        f"loss by position, context {lengths[-1]}\n{losses[-1].by_position.format_table()}"
    )
    return values, f"{format_header(header)}\n\n{format_table(losses)}\n\n{by_position}", draw


def evaluate_long(
    arguments: argparse.Namespace, folder: Path, model: Any, tokenizer: Any, scratch: Path
) -> tuple:
    """Measure loss by position beyond the trained length and, on tales, run the needle test. See evaluate_text()."""
    from thinker.evaluation import long_context, needle

    source, trained, *_, tokens = load_tokens(arguments, folder, tokenizer, scratch)
    trained = trained or model.config.max_seq_len
    longest, needles = arguments.factor * trained, []
    windows = long_context.long_windows(model.config, tokens, longest)
    loss = long_context.loss_by_position(
        model, windows, max(1, 4096 // windows.seq_len), arguments.windows, trained
    )
    if source == "tales":
        max_distance = min(longest, 1 << 14)  # longer stories take minutes
        needles = [
            needle.needle_test(model, tokenizer, 2**n) for n in range(4, max_distance.bit_length())
        ]
    draw = partial(
        plot, loss, needles, arguments.png, f"{arguments.run} on {arguments.path or source}"
    )
    header = {
        "checkpoint": str(folder),
        "trained_length": loss.trained_length,
        "rope_scaling": arguments.rope_scaling,
    }
    header |= {"source": source, "window_length": windows.seq_len, "windows": len(loss.nats)}
    header["tokens"] = int(loss.counts.sum())
    text = format_header(header)
    if windows.seq_len < longest:
        learned = (
            model.config.positions == "learned" and windows.seq_len == model.config.max_seq_len
        )
        reason = (
            f"the model has {windows.seq_len} learned positions"
            if learned
            else "the text is shorter"
        )
        text += f"\nwindows have {windows.seq_len} tokens instead of {longest}: {reason}"
    found = (
        needle.format_table(needles)
        if needles
        else "skipped the needle test, which needs --source tales"
    )
    values = header | {"long": loss.to_dict(), "needle": needles or None}
    return values, f"{text}\n\n{loss.format_table()}\n\n{found}", draw


def evaluate_tasks(
    arguments: argparse.Namespace, model: Any, tokenizer: Any
) -> tuple[dict[str, Any], str]:
    """Run the harness: results for JSON, and a text with one line per metric."""
    try:
        from thinker.evaluation.lm_eval_harness import run_tasks
    except ModuleNotFoundError as error:
        raise UserError(
            f"--tasks needs the {error.name} package; run pip install lm-eval"
        ) from error
    results = run_tasks(
        model, tokenizer, arguments.tasks, arguments.include, arguments.shots, arguments.limit
    )
    lines = [f"{'task':>24}  {'metric':>18}  {'value':>8}  {'std error':>9}  {'questions':>9}"]
    for task, metrics in results.items():
        for metric in (
            name for name in metrics if not name.endswith("_stderr") and name != "questions"
        ):
            error = f"{metrics[f'{metric}_stderr']:.4f}" if f"{metric}_stderr" in metrics else ""
            numbers = f"{metrics[metric]:8.4f}  {error:>9}  {metrics.get('questions', ''):>9}"
            lines.append(f"{task:>24}  {metric:>18}  {numbers}")
    return results, "\n".join(lines)


def main() -> int:
    """Load the model, evaluate, print. Returns the exit status."""
    arguments = parse_arguments()
    from thinker.evaluation import long_context
    from thinker.interop import load
    from thinker.interop.find import find_model
    from thinker.runtime.checks import finite_json
    from thinker.runtime.device import choose_device, configure_backend

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
    if arguments.tasks is not None:
        values, text = evaluate_tasks(arguments, model, tokenizer)
    else:
        with tempfile.TemporaryDirectory() as scratch:
            evaluate = evaluate_long if arguments.long else evaluate_text
            values, text, draw = evaluate(arguments, folder, model, tokenizer, Path(scratch))
    print(finite_json(values) if arguments.json else text, flush=True)
    if arguments.png:
        draw()
    return 0


if __name__ == "__main__":
    run_command(main)
