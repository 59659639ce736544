"""What each form of attention and of positions buys: the same small model and tokens, several seeds, two corpora."""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from thinker.benchmarks.environment import finish
from thinker.benchmarks.training_runs import Training, train_all
from thinker.data.prefetch import Batch
from thinker.runtime.device import configure_backend
from thinker.runtime.errors import UserError
from thinker.runtime.plotting import BLUE, GREY, new_figure
from thinker.training.config import load_config
from thinker.training.optimizers import resolve_learning_rates
from thinker.training.step import TrainingStep, build_model

# token(46) is the full stop in both corpora.
FORMS: dict[str, list[str]] = {
    "full": [],
    **{
        pattern: [f"model.attention={pattern}"]
        for pattern in (
            "window(32)", "dilated(128, 4)", "window(16) | global(4)", "window(16) | token(46)", "block(32, 2)",
            "strided(16)", "longformer(16, 4, 4)", "bigbird(16, 4, 16, 2)", "prefix(32)", "topk(16)",
            "heads(window(16), full)", "linear(64)",
        )
    },
    "LLLG, window 32": ["model.attention=LLLG", "model.window=32"],
    **{f"positions: {kind}": [f"model.positions={kind}"] for kind in ("alibi", "learned", "sinusoidal", "none")},
    "no QK-norm": ["model.qk_norm=false"],
    "soft-cap 20": ["model.attn_logit_softcap=20"],
    "sink logits": ["model.attention_sinks=true"],
    "isolated documents": ["data.document_masking=true"],
}  # fmt: skip
CONFIGS = {"tales": ("tales-default.yaml", 16, 100), "pysource": ("pysource-default.yaml", 8, 120)}  # sequences, steps
ALWAYS = ["train.eval_every=null", "train.precision=bf16", "train.compile=false", "train.device=cpu"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What can be chosen."""
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, help="fewer, to try it")
    parser.add_argument("--jobs", type=int, default=2, help="trainings at a time, the cores shared out")
    parser.add_argument("--rounds", type=int, default=5, help="of the timing, in which every form makes a step in turn")
    parser.add_argument("--folder", type=Path, default=Path("runs/ablation"), help="what is there is not repeated")
    parser.add_argument("--only", nargs="*", metavar="FORM", help="these forms; full is always there")
    parser.add_argument("--png", type=Path, help="draw the losses against full's, with the speeds")
    parser.add_argument("--out", type=Path, help="append the line of JSON there")


def run(arguments: argparse.Namespace) -> None:
    """Train every form, time a step of each beside the others, print a table a corpus and a line of JSON."""
    for form in arguments.only or ():
        if form not in FORMS:
            raise UserError(f"there is no form {form!r}; there are: {'; '.join(FORMS)}")
    forms = {name: keys for name, keys in FORMS.items() if not arguments.only or name in ("full", *arguments.only)}
    trainings, rows = {}, []
    for corpus, (config, batch_size, steps) in CONFIGS.items():
        for name, keys in forms.items():
            for seed in range(1, arguments.seeds + 1):
                overrides = [*ALWAYS, *keys, f"run.seed={seed}", f"train.max_steps={arguments.steps or steps}"]
                overrides.append(f"train.batch_size={batch_size}")
                path = Path(__file__).parent / "configs" / config
                folder = arguments.folder / f"{corpus}-{name.translate(str.maketrans(' (),|:', '------'))}-{seed}"
                load_config(path, overrides)  # a mistake shows before the first hour of training
                trainings[corpus, name, seed] = Training(f"{corpus}, {name}, {seed}", path, overrides, folder)
    train_all(list(trainings.values()), arguments.jobs)
    speeds = {corpus: time_forms(corpus, forms, arguments.rounds) for corpus in CONFIGS}
    for corpus in CONFIGS:
        seeds = range(1, arguments.seeds + 1)
        losses = {name: [trainings[corpus, name, seed].loss for seed in seeds] for name in forms}
        print(
            f"{corpus}: nats a token over {len(seeds)} seeds, and against full with the same seed; tokens/s, of full's"
        )
        for name, values in losses.items():
            against = [mine - full for mine, full in zip(values, losses["full"])]
            row = {"corpus": corpus, "form": name, "losses": values, "mean": statistics.mean(values)}
            row |= {"against_full": statistics.mean(against), "tokens": trainings[corpus, name, 1].final["tokens"]}
            row["spread"] = statistics.stdev(against) if len(values) > 1 else 0.0
            row |= speeds[corpus][name]
            rows.append(row)
            print(
                f"{name:<26} {row['mean']:.4f}  {row['against_full']:+.4f} ± {row['spread']:.4f}"
                f"  {row['tokens_per_second']:>8,.0f}  {row['of_full']:.2f}"
            )
    if arguments.png:
        draw_picture(rows, arguments.png)
    finish({"benchmark": "ablation", "rows": rows}, arguments.out)


def time_forms(corpus: str, forms: dict[str, list[str]], rounds: int) -> dict[str, dict[str, float]]:
    """Medians of a training step's tokens a second, and of its ratio to full's in the same round."""
    device, steps = torch.device("cpu"), {}
    configure_backend(device)
    for name, keys in forms.items():
        file, batch_size, _ = CONFIGS[corpus]
        overrides = [*ALWAYS, *keys, f"train.batch_size={batch_size}"]
        config = load_config(Path(__file__).parent / "configs" / file, overrides)
        config.train.micro_batch_size = config.train.batch_size
        model_config = config.thinker_config(vocab_size=3072 if corpus == "tales" else 2048)
        config.optimizer = resolve_learning_rates(config.optimizer, model_config, config.train.batch_size)
        steps[name] = TrainingStep(build_model(model_config, 1, device), config), config
    seconds: dict[str, list[float]] = {name: [] for name in forms}
    for number in tqdm(range(rounds + 1), desc=f"timing on {corpus}"):
        for name, (step, config) in steps.items():
            shape = config.train.batch_size, config.data.seq_len
            tokens = torch.randint(1, step.model.config.vocab_size, shape)
            documents = (torch.rand(shape) < 1 / 200).cumsum(1) if config.data.document_masking else None
            start = time.perf_counter()
            float(step(Batch(tokens, tokens, tokens.numel(), documents), 1e-3)[0])
            if number:  # the first one warms up
                seconds[name].append(time.perf_counter() - start)
    return {
        name: {
            "tokens_per_second": tokens.numel() / statistics.median(taken),
            "of_full": statistics.median(full / mine for full, mine in zip(seconds["full"], taken)),
        }
        for name, taken in seconds.items()
    }


def draw_picture(rows: list[dict[str, Any]], path: Path) -> None:
    """Every form's loss against full's, its spread over the seeds, and its speed: a panel a corpus."""
    corpora, forms = (list(dict.fromkeys(row[key] for row in rows)) for key in ("corpus", "form"))
    figure, panels = new_figure(11, 1.2 + 0.27 * len(forms), columns=len(corpora))
    for axes, corpus in zip(panels, corpora):
        for height, row in enumerate(row for row in rows if row["corpus"] == corpus):
            color = GREY if row["form"].startswith("prefix") else BLUE  # it predicts fewer tokens: no comparison
            axes.errorbar(row["against_full"], height, xerr=row["spread"], color=color, marker="o", markersize=4)
            axes.annotate(f"{row['of_full']:.2f}", (1.02, height), xycoords=("axes fraction", "data"), va="center")
        axes.axvline(0, color=GREY, linewidth=1)
        axes.set_yticks(range(len(forms)), forms)
        axes.set_ylim(len(forms) - 0.5, -1)
        axes.set_xlabel("nats a token above full, and the deviation over seeds")
        axes.set_title(corpus, loc="left")
        axes.annotate("tokens/s, full = 1", (1.02, -0.75), xycoords=("axes fraction", "data"), ha="center", fontsize=8)
    figure.savefig(path)
