"""Loss and speed of attention variants and position encodings, over seeds and two corpora."""

import argparse
import statistics
from functools import partial
from pathlib import Path
from typing import Any

import torch

from thinker.benchmarks.environment import time_alternately
from thinker.benchmarks.training_runs import ROOT, train_all
from thinker.data.batches.prefetch import Batch
from thinker.runtime.backend import configure_backend
from thinker.runtime.errors import UserError
from thinker.runtime.plot_style import BLUE, GREY, new_figure
from thinker.training.config.load import load_config
from thinker.training.processes.training_process import TrainingProcess
from thinker.training.settings.resolve import resolve_settings
from thinker.training.step import TrainingStep, build_model

# token(46) is the full stop in both corpora.
VARIANTS: dict[str, list[str]] = {
    "full": [],
    **{
        pattern: [f"model.attention={pattern}"]
        for pattern in (
            "window(32)", "dilated(128, 4)", "window(16) | global(4)", "window(16) | token(46)", "block(32, 2)",
            "strided(16)", "longformer(16, 4, 4)", "bigbird(16, 4, 16, 2)", "prefix(32)", "topk(16)",
            "retrieve(16, 2)", "heads(window(16), full)", "linear(64)",
        )
    },
    "LLLG, window 32": ["model.attention=LLLG", "model.window=32"],
    **{f"positions: {kind}": [f"model.positions={kind}"] for kind in ("alibi", "learned", "sinusoidal", "none")},
    "no QK-norm": ["model.qk_norm=false"],
    "logit soft-cap 20": ["model.attn_logit_softcap=20"],
    "attention sinks": ["model.attention_sinks=true"],
    "document masking": ["data.document_masking=true"],
}  # fmt: skip
CORPORA = {
    "tales": ("tales-default.yaml", 16, 100),
    "pysource": ("pysource-default.yaml", 8, 120),
}  # batch size, steps
COMMON_OVERRIDES = [
    "train.eval_every=null",
    "train.precision=bf16",
    "train.compile=false",
    "train.device=cpu",
]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark."""
    parser.add_argument(
        "--seeds", type=int, default=3, help="training runs per variant, with seeds 1 to N"
    )
    parser.add_argument(
        "--steps", type=int, help="training steps, for a quick test (default: 100 or 120 by corpus)"
    )
    parser.add_argument(
        "--jobs", type=int, default=2, help="training runs in parallel, which share the cores"
    )
    parser.add_argument(
        "--rounds", type=int, default=5, help="timing rounds, each with one step per variant"
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("runs/ablation"),
        help="folder for runs; finished runs are reused",
    )
    parser.add_argument(
        "--only", nargs="*", metavar="VARIANT", help="variants to run, besides full (default: all)"
    )
    parser.add_argument(
        "--png", type=Path, metavar="FILE", help="plot losses and speeds relative to full attention"
    )


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Train every variant, time its steps alternately with the others, and print a table for each
    corpus."""
    for name in arguments.only or ():
        if name not in VARIANTS:
            raise UserError(f"unknown variant {name!r}; choose from: {'; '.join(VARIANTS)}")
    chosen = ("full", *arguments.only) if arguments.only else tuple(VARIANTS)
    variants = {name: overrides for name, overrides in VARIANTS.items() if name in chosen}
    seeds = range(1, arguments.seeds + 1)
    runs: dict[tuple[str, str, int], TrainingProcess] = {}
    for corpus, (file, batch_size, default_steps) in CORPORA.items():
        steps = arguments.steps or default_steps
        for name, variant in variants.items():
            for seed in seeds:
                overrides = [
                    *COMMON_OVERRIDES,
                    *variant,
                    f"run.seed={seed}",
                    f"train.max_steps={steps}",
                ]
                overrides.append(f"train.batch_size={batch_size}")
                folder = (
                    arguments.folder
                    / f"{corpus}-{name.translate(str.maketrans(' (),|:', '------'))}-{seed}"
                )
                path = ROOT / "benchmarks" / "configs" / file
                runs[corpus, name, seed] = TrainingProcess(
                    f"{corpus}, {name}, {seed}", path, overrides, folder
                )
    train_all(list(runs.values()), arguments.jobs)
    rows = []
    for corpus in CORPORA:
        speeds = time_variants(corpus, variants, arguments.rounds)
        losses = {}
        for name in variants:
            losses[name] = [runs[corpus, name, seed].loss for seed in seeds]
        print(
            f"{corpus}, {len(seeds)} seeds: nats per token, difference from full, tokens/s, speed relative to full"
        )
        for name, values in losses.items():
            differences = [loss - full_loss for loss, full_loss in zip(values, losses["full"])]
            row = {
                "corpus": corpus,
                "variant": name,
                "losses": values,
                "mean_loss": statistics.mean(values),
            }
            row["loss_difference"] = statistics.mean(differences)
            row["loss_difference_std"] = statistics.stdev(differences) if len(values) > 1 else 0.0
            row |= {"tokens": runs[corpus, name, 1].final["tokens"], **speeds[name]}
            rows.append(row)
            print(
                f"{name:<26} {row['mean_loss']:.4f}  {row['loss_difference']:+.4f} ± {row['loss_difference_std']:.4f}"
                f"  {row['tokens_per_second']:>8,.0f}  {row['relative_speed']:.2f}"
            )
    if arguments.png:
        plot(rows, arguments.png)
    return {"rows": rows}


def time_variants(
    corpus: str, variants: dict[str, list[str]], rounds: int
) -> dict[str, dict[str, float]]:
    """Median training speed of each variant, and its median ratio to full attention in the same
    round."""
    device, steps = torch.device("cpu"), []
    configure_backend(device)
    file, batch_size, _ = CORPORA[corpus]
    for variant in variants.values():
        overrides = [
            *COMMON_OVERRIDES,
            *variant,
            f"train.batch_size={batch_size}",
            "train.micro_batch_size=null",
        ]
        config = load_config(ROOT / "benchmarks" / "configs" / file, overrides)
        vocab_size = 3072 if corpus == "tales" else 2048
        model_config = config.thinker_config(vocab_size=vocab_size)
        step = TrainingStep(
            build_model(model_config, 1, device), resolve_settings(config, model_config, device)
        )
        tokens = torch.randint(1, model_config.vocab_size, (batch_size, config.data.seq_len))
        documents = (
            (torch.rand(tokens.shape) < 1 / 200).cumsum(1) if config.data.document_masking else None
        )
        steps.append(partial(step, Batch(tokens, tokens, tokens.numel(), documents), 1e-3))
    speeds, seconds = {}, dict(zip(variants, time_alternately(steps, rounds, device)))
    for name, times in seconds.items():
        relative_speeds = [full / own for full, own in zip(seconds["full"], times)]
        speeds[name] = {"tokens_per_second": tokens.numel() / statistics.median(times),
                        "relative_speed": statistics.median(relative_speeds)}  # fmt: skip
    return speeds


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """One panel per corpus: each variant's loss minus that of full attention, its std, and the
    relative speed."""
    corpora = list(dict.fromkeys(row["corpus"] for row in rows))
    variants = list(dict.fromkeys(row["variant"] for row in rows))
    figure, panels = new_figure(11, 1.2 + 0.27 * len(variants), columns=len(corpora))
    for axes, corpus in zip(panels, corpora):
        for y, row in enumerate(row for row in rows if row["corpus"] == corpus):
            # A prefix has fewer tokens to predict, so its loss cannot be compared.
            color = GREY if row["variant"].startswith("prefix") else BLUE
            axes.errorbar(row["loss_difference"], y, xerr=row["loss_difference_std"], color=color, marker="o",
                          markersize=4)  # fmt: skip
            axes.annotate(
                f"{row['relative_speed']:.2f}",
                (1.02, y),
                xycoords=("axes fraction", "data"),
                va="center",
            )
        axes.axvline(0, color=GREY, linewidth=1)
        axes.set_yticks(range(len(variants)), variants)
        axes.set_ylim(len(variants) - 0.5, -1)
        axes.set_xlabel("loss minus full attention's (nats per token)")
        axes.set_title(corpus, loc="left")
        axes.annotate(
            "tokens/s, full = 1",
            (1.02, -0.75),
            xycoords=("axes fraction", "data"),
            ha="center",
            fontsize=8,
        )
    figure.savefig(path)
