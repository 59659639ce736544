"""What a model makes of texts longer than its training's: python scripts/eval.py PATH --long."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from errors import UserError, run_command
from generate import Parser


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = Parser(description="Loss by position in long texts; on tales, also how far back facts are still used.")
    parser.add_argument("run", metavar="PATH", help="a run directory, such as runs/quickstart, or a checkpoint in it")
    parser.add_argument("--long", action="store_true", help="in texts longer than those of the training")
    parser.add_argument("--factor", type=int, default=4, help="how many times as long, at most (default 4)")
    parser.add_argument("--rope-scaling", metavar="YAML", help='such as "{type: linear, factor: 4}", for this once')
    parser.add_argument("--source", choices=["tales", "pydocs", "text"], help="what to read (default: as in training)")
    parser.add_argument("--path", metavar="FILE", help="with --source text: a file, a folder or a glob")
    parser.add_argument("--windows", type=int, default=32, help="at most so many of the validation split (default 32)")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the tables")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw both into this picture")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or mps")
    parser.add_argument("--checkpoint", default="latest", help="of a run directory: latest, best or a name")
    arguments = parser.parse_args()
    if not arguments.long:
        raise UserError("there is nothing to do; --long evaluates in texts longer than those of the training")
    if arguments.factor < 1 or arguments.windows < 1:
        raise UserError(f"--factor is {arguments.factor}, --windows {arguments.windows}; both must be at least 1")
    if (arguments.path is None) == (arguments.source == "text"):
        raise UserError("--source text and --path FILE go together")
    return arguments


def validation_split(folder: Path, source: str | None, path: str | None) -> tuple[str, int, Any]:
    """The source's name, the length of the training's windows, and the validation tokens.

    As the run of a checkpoint splits its text, or would split another.
    """
    from data.tokenizer import FILE_NAME, Tokenizer
    from training.loop import prepare_data
    from training.recipe import load_recipe

    run = folder.resolve().parent.parent
    if not (run / "config.yaml").is_file():
        raise UserError(f"{folder} lies in no run directory, whose config.yaml says how its text was split")
    given = {"source": source, "path": path, "tokenizer": str(run / FILE_NAME)}
    given |= dict.fromkeys(("config", "split", "column", "streaming"))
    overrides = [f"data.{name}={json.dumps(value)}" for name, value in given.items()] if source else []
    recipe = load_recipe(run / "config.yaml", overrides)
    corpus = prepare_data(recipe)
    if corpus.tokenizer.content_hash != Tokenizer.load(run).content_hash:
        raise UserError(f"the text of data.source={recipe.data.source} is not that of the training; give --source")
    return recipe.data.source, recipe.data.seq_len, corpus.val


def draw(loss: Any, needles: list[dict[str, Any]], path: Path) -> None:
    """Loss by position, an eighth of the trained length a point, beside the needles' accuracy by distance."""
    from training.picture import BLUE, GREY, ORANGE, new_figure

    figure, panels = new_figure(11 if needles else 6, 4.2, 2 if needles else 1, share=False)
    length, T = loss.trained_length, loss.nats.shape[1]
    step = max(1, length // 8)
    parts = [part for part in (loss.segment(at, min(at + step, T)) for at in range(0, T, step)) if part.n_tokens]
    points = [((part.start + part.end) / 2, part.loss, part.error or 0) for part in parts]
    panels[0].errorbar(*zip(*points), color=BLUE, marker="o", markersize=3)
    panels[0].set(xlabel="position", ylabel="loss (nats a token)")
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
    try:
        figure.savefig(path, format="png")
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError) as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None


def main() -> int:
    """Evaluate, print, draw. Returns the exit status."""
    arguments = parse_arguments()
    from device import choose_device, tune
    from evaluation import long, needle
    from storage import load
    from storage.load import find_checkpoint

    device = choose_device(arguments.device)
    tune(device)
    folder = find_checkpoint(arguments.run, arguments.checkpoint)
    thinker, tokenizer = load(folder, device)
    if tokenizer is None:
        raise UserError(f"{folder} has no tokenizer beside it, without which there is nothing to read")
    if arguments.rope_scaling is not None:
        long.stretch(thinker, arguments.rope_scaling)
    source, length, tokens = validation_split(folder, arguments.source, arguments.path)
    longest, needles = arguments.factor * length, []
    windows = long.long_windows(thinker.config, tokens, longest)
    loss = long.loss_by_position(thinker, windows, max(1, 4096 // windows.seq_len), arguments.windows, length)
    if source == "tales":
        farthest = min(longest, 1 << 14)  # longer stories take minutes
        distances = [2**n for n in range(4, farthest.bit_length()) if 2**n <= farthest]
        needles = [needle.needle_test(thinker, tokenizer, distance) for distance in distances]
    if arguments.png:
        draw(loss, needles, arguments.png)
    about = {"checkpoint": str(folder), "trained_length": loss.trained_length, "rope_scaling": arguments.rope_scaling}
    about |= {
        "source": source,
        "window_length": windows.seq_len,
        "windows": len(loss.nats),
        "tokens": int(loss.counts.sum()),
    }
    if arguments.json:
        print(json.dumps(about | {"long": loss.to_dict(), "needle": needles or None}))
        return 0
    print("\n".join(f"{name.replace('_', ' '):>15}  {value}" for name, value in about.items() if value is not None))
    if windows.seq_len < longest:
        learned = thinker.config.positions == "learned" and windows.seq_len == thinker.config.max_seq_len
        reason = f"the model has learned {windows.seq_len} positions" if learned else "the validation split is as short"
        print(f"{reason}; longer texts cannot be read")
    print(f"\n{loss.table()}\n")
    print(needle.table(needles) if needles else "no needles: they are of the corpus tales (--source tales)")
    return 0


if __name__ == "__main__":
    run_command(main)
