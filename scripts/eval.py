"""How well a model predicts: python scripts/eval.py PATH."""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from thinker.runtime.cli import ArgumentParser
from thinker.runtime.errors import UserError, run_command

TEXT_FLAGS = ("source", "path", "column", "max_tokens", "rope_scaling", "png")
PLAIN_FLAGS = ("context", "stride", "confidence")
LONG_FLAGS = ("factor", "windows")
TASK_FLAGS = ("include", "shots", "limit")
MOST_TOKENS = 200_000


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = ArgumentParser(description="Loss, perplexity and bits per byte on a text; tasks; long texts.")
    parser.add_argument("run", metavar="PATH", help="a run directory, a checkpoint in it, or a Hugging Face folder")
    group = parser.add_argument_group("what is read")
    sources = ["tales", "pysource", "text", "jsonl", "parquet"]
    group.add_argument("--source", choices=sources, help="default: what the run validates on")
    group.add_argument("--path", metavar="FILE", help="of text, jsonl and parquet: a file, a folder or a glob")
    group.add_argument("--column", metavar="NAME", help="of jsonl and parquet (default text)")
    group.add_argument(
        "--max-tokens", type=int, metavar="N", help=f"of --source, its first so many (default {MOST_TOKENS})"
    )
    group = parser.add_argument_group("how")
    group.add_argument("--context", metavar="N,...", help="context lengths, such as 128,256 (default: the trained one)")
    group.add_argument("--stride", type=int, metavar="N", help="windows overlap; each counts its last N tokens")
    group.add_argument("--confidence", type=float, default=0.95, help="of the intervals (default 0.95)")
    group.add_argument("--rope-scaling", metavar="YAML", help='such as "{type: linear, factor: 4}", for this once')
    group.add_argument("--device", default="auto", help="auto, cpu, cuda or mps")
    group.add_argument("--checkpoint", default="latest", help="of a run directory: latest, best or a name")
    group = parser.add_argument_group("instead: texts longer than those of the training")
    group.add_argument("--long", action="store_true", help="loss by position there; on tales also a needle test")
    group.add_argument("--factor", type=int, default=4, help="how many times as long, at most (default 4)")
    group.add_argument("--windows", type=int, default=32, help="at most so many (default 32)")
    group = parser.add_argument_group("instead: tasks of EleutherAI's lm-evaluation-harness (pip install lm-eval)")
    group.add_argument("--tasks", metavar="NAME,...", help="such as hellaswag,arc_easy; their data is downloaded")
    group.add_argument("--include", type=Path, metavar="FOLDER", help="a folder of your own tasks as YAML files")
    group.add_argument("--shots", type=int, help="examples before each question (default: as the task says)")
    group.add_argument("--limit", type=int, help="the first so many questions of each task only")
    group = parser.add_argument_group("what comes out")
    group.add_argument("--json", action="store_true", help="one JSON object instead of the tables")
    group.add_argument("--png", type=Path, metavar="FILE", help="a picture of the loss by position")
    arguments = parser.parse_args()
    check_flags(arguments, parser)
    return arguments


def check_flags(arguments: argparse.Namespace, parser: ArgumentParser) -> None:
    """Raise UserError for flags that contradict each other or that the mode does not read."""
    if arguments.tasks is not None:
        parser.check_unused(arguments, "--tasks", ("long", *TEXT_FLAGS, *PLAIN_FLAGS, *LONG_FLAGS))
    elif arguments.long:
        parser.check_unused(arguments, "--long", PLAIN_FLAGS + TASK_FLAGS)
    else:
        parser.check_unused(arguments, "a plain evaluation", LONG_FLAGS + TASK_FLAGS)
    for name in ("factor", "windows", "max_tokens", "stride", "limit"):
        if getattr(arguments, name) is not None and getattr(arguments, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} is {getattr(arguments, name)}; it must be at least 1")
    if not 0 < arguments.confidence <= 0.9999:
        raise UserError(f"--confidence is {arguments.confidence}; it must lie between 0 and 0.9999, such as 0.95")
    if arguments.max_tokens is not None and arguments.source is None:
        raise UserError("--max-tokens goes with --source; a run's own text is read whole")
    lengths = context_lengths(arguments.context) or [arguments.stride or 0]
    if (arguments.stride or 0) > min(lengths):
        raise UserError(f"--stride is {arguments.stride}, longer than a --context of {min(lengths)}; lower it")
    if arguments.stride and arguments.source == "tales":
        raise UserError("--stride cuts texts anywhere; windows of tales begin with a document: leave it out")
    if arguments.include is not None and not arguments.include.is_dir():
        raise UserError(f"--include {arguments.include} is no folder")
    if arguments.png is not None and not arguments.png.absolute().parent.is_dir():
        raise UserError(f"cannot write {arguments.png}: its folder does not exist")
    needs_path = arguments.source in ("text", "jsonl", "parquet")
    if (arguments.path is not None) != needs_path:
        raise UserError("--source text, jsonl or parquet and --path FILE go together")


def context_lengths(text: str | None) -> list[int]:
    """ "128,256" as numbers; none for None."""
    try:
        lengths = [int(part) for part in text.split(",")] if text is not None else []
    except ValueError:
        lengths = [0]
    if lengths and min(lengths) < 2:
        raise UserError(f"--context {text} is no list of lengths from 2 on, such as 128,256")
    return lengths


def find_tokens(
    arguments: argparse.Namespace, folder: Path, tokenizer: Any, scratch: Path
) -> tuple[str, int | None, str, Any]:
    """The source's name, the length of the training's windows where it is known, how documents lie, and the tokens."""
    from thinker.data.sources import open_source
    from thinker.evaluation.perplexity import tokenize
    from thinker.training.validation_data import load_run_config, load_validation_data

    if arguments.source is not None:
        options = {"column": arguments.column} if arguments.column else {}
        most = arguments.max_tokens or MOST_TOKENS
        if arguments.source == "tales":  # others than those of the training
            options |= {"max_documents": 1 + most // 16, "seed": 1 << 40}
        source = open_source(arguments.source, path=arguments.path, **options)
        tokens = tokenize(source, tokenizer, most, scratch)
        packing, config = "documents" if arguments.source == "tales" else "contiguous", load_run_config(folder)
        return arguments.source, config and config.data.seq_len, packing, tokens
    config, tokens = load_validation_data(folder, tokenizer, "--source")
    packing = "documents" if config.data.source == "tales" else config.data.packing
    return config.data.source, config.data.seq_len, packing, tokens


def draw(loss: Any, needles: list[dict[str, Any]], path: Path, title: str) -> None:
    """Loss by position, an eighth of the trained length a point, beside the needles' accuracy by distance."""
    from thinker.runtime.plot_style import BLUE, GREY, ORANGE, new_figure

    figure, panels = new_figure(11 if needles else 6, 4.2, 2 if needles else 1, share=False)
    length, T = loss.trained_length, loss.nats.shape[1]
    step = max(1, length // 8)
    parts = [loss.segment(at, min(at + step, T)) for at in range(0, T, step)]
    most = max(part.n_tokens for part in parts)
    parts = [part for part in parts if part.n_tokens >= most / 100]  # means of few tokens are noise
    points = [((part.start + part.end) / 2, part.loss, part.error or 0) for part in parts]
    panels[0].errorbar(*zip(*points), color=BLUE, marker="o", markersize=3)
    panels[0].set(xlabel="position", ylabel="loss (nats per token)")
    if points := [(one["distance"], one["accuracy"], one["error"]) for one in needles if "accuracy" in one]:
        panels[1].errorbar(*zip(*points), color=ORANGE, marker="o", markersize=3)
        panels[1].set_xscale("log", base=2)
        panels[1].set_xticks([n for n, *_ in points], [str(n) for n, *_ in points])
        chance = [one["chance"] for one in needles if "accuracy" in one]
        panels[1].plot([n for n, *_ in points], chance, color=GREY, linestyle=":", label="chance")
        panels[1].set(xlabel="tokens since the fact", ylabel="accuracy of the needles", ylim=(-0.03, 1.03))
    for axes in panels:
        axes.axvline(length, color=GREY, linestyle="--", label=f"trained length, {length}")
        axes.legend(frameon=False)
    figure.suptitle(title, fontsize=10)
    try:
        figure.savefig(path, format="png")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error


def show(about: dict[str, Any]) -> None:
    """What was evaluated, a line each."""
    print("\n".join(f"{name.replace('_', ' '):>15}  {value}" for name, value in about.items() if value is not None))


def measure(arguments: argparse.Namespace, folder: Path, model: Any, tokenizer: Any, scratch: Path) -> None:
    """Loss, perplexity and bits per byte at every length of context."""
    from thinker.data.batches import PackedDataset
    from thinker.data.tokenizer import token_byte_lengths
    from thinker.evaluation.perplexity import table, text_loss

    source, trained, packing, tokens = find_tokens(arguments, folder, tokenizer, scratch)
    trained = trained or min(model.config.max_seq_len, 1024)
    longest = max(shard.n_tokens - 1 for shard in tokens.shards)
    if arguments.stride and packing == "documents":
        raise UserError(f"--stride cuts texts anywhere; windows of this run's {source} begin with a document")
    lengths, found = token_byte_lengths(tokenizer), []
    for length in context_lengths(arguments.context) or [min(trained, longest)]:
        stride = arguments.stride or length
        if max(length, stride) > longest:
            raise UserError(f"a --context of {max(length, stride)} is longer than the text, which has {longest} tokens")
        windows = PackedDataset(tokens, length, packing, stride=stride, prefix_len=model.config.prefix)
        found.append(text_loss(model, windows, lengths, confidence=arguments.confidence, trained_length=trained))
    if arguments.png:
        draw(found[-1].by_position, [], arguments.png, f"{arguments.run} on {arguments.path or source}")
    about = {"model": str(folder), "source": source, "path": arguments.path, "trained_length": trained}
    about |= {"stride": arguments.stride, "rope_scaling": arguments.rope_scaling, "confidence": arguments.confidence}
    if arguments.json:
        print(json.dumps(about | {"losses": [one.to_dict() for one in found]}))
        return
    floor = found[0].entropy_floor
    about |= {"confidence": f"{arguments.confidence:.4g}, of the [intervals]", "bytes": f"{found[0].n_bytes:,}"}
    show(about | {"entropy_floor": None if floor is None else f"{floor:.4f} nats per token, the minimum"})
    print(f"\n{table(found)}\n\nby position, at a context of {found[-1].context_length}")
    print(found[-1].by_position.table())


def measure_long(arguments: argparse.Namespace, folder: Path, model: Any, tokenizer: Any, scratch: Path) -> None:
    """Loss by position in texts longer than those of the training, and on tales the needles."""
    from thinker.evaluation import long_context, needle

    source, trained, _, tokens = find_tokens(arguments, folder, tokenizer, scratch)
    trained = trained or model.config.max_seq_len
    longest, needles = arguments.factor * trained, []
    windows = long_context.long_windows(model.config, tokens, longest)
    loss = long_context.loss_by_position(model, windows, max(1, 4096 // windows.seq_len), arguments.windows, trained)
    if source == "tales":
        farthest = min(longest, 1 << 14)  # longer stories take minutes
        distances = [2**n for n in range(4, farthest.bit_length()) if 2**n <= farthest]
        needles = [needle.needle_test(model, tokenizer, distance) for distance in distances]
    if arguments.png:
        draw(loss, needles, arguments.png, f"{arguments.run} on {arguments.path or source}")
    about = {"checkpoint": str(folder), "trained_length": loss.trained_length, "rope_scaling": arguments.rope_scaling}
    about |= {"source": source, "window_length": windows.seq_len, "windows": len(loss.nats)}
    about |= {"tokens": int(loss.counts.sum())}
    if arguments.json:
        print(json.dumps(about | {"long": loss.to_dict(), "needle": needles or None}))
        return
    show(about)
    if windows.seq_len < longest:
        learned = model.config.positions == "learned" and windows.seq_len == model.config.max_seq_len
        reason = f"the model has learned {windows.seq_len} positions" if learned else "the text is as short"
        print(f"{reason}; longer texts cannot be read")
    print(f"\n{loss.table()}\n")
    print(needle.table(needles) if needles else "no needles: they are of the corpus tales (--source tales)")


def measure_tasks(arguments: argparse.Namespace, model: Any, tokenizer: Any) -> None:
    """What the harness finds, a task a line."""
    try:
        from thinker.evaluation.lm_eval_harness import run_tasks
    except ModuleNotFoundError as error:
        raise UserError(f"--tasks needs the package {error.name}: pip install lm-eval") from error
    names = [name for name in arguments.tasks.split(",") if name]
    options = {"include": arguments.include, "n_shots": arguments.shots, "limit": arguments.limit}
    results = run_tasks(model, tokenizer, names, **options)
    if arguments.json:
        print(json.dumps(results))
        return
    print(f"{'task':>24}  {'metric':>18}  {'value':>8}  {'std error':>9}  {'questions':>9}")
    for task, metrics in results.items():
        questions = metrics.get("questions", "")
        for metric in (name for name in metrics if not name.endswith("_stderr") and name != "questions"):
            error = metrics.get(f"{metric}_stderr")
            error = "" if error is None else f"{error:.4f}"
            print(f"{task:>24}  {metric:>18}  {metrics[metric]:8.4f}  {error:>9}  {questions:>9}")


def main() -> int:
    """Evaluate, print, draw. Returns the exit status."""
    arguments = parse_arguments()
    from thinker.evaluation import long_context
    from thinker.interop import load
    from thinker.interop.load import find_model
    from thinker.runtime.device import choose_device, configure_backend

    device = choose_device(arguments.device)
    configure_backend(device)
    folder = find_model(arguments.run, arguments.checkpoint)
    model, tokenizer = load(folder, device)
    if tokenizer is None:
        raise UserError(f"{folder} has no tokenizer beside it, without which there is nothing to read")
    if arguments.rope_scaling is not None:
        long_context.override_rope_scaling(model, arguments.rope_scaling)
    if arguments.tasks is not None:
        measure_tasks(arguments, model, tokenizer)
    else:
        with tempfile.TemporaryDirectory() as scratch:
            mode = measure_long if arguments.long else measure
            mode(arguments, folder, model, tokenizer, Path(scratch))
    return 0


if __name__ == "__main__":
    run_command(main)
