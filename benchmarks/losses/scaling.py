"""Power law of loss by compute, fitted to several model sizes."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from thinker.benchmarks.training_runs import parse_shapes, train_all
from thinker.runtime.errors import UserError
from thinker.runtime.plot_style import GREY, ORANGE, new_figure
from thinker.training.config.load import load_config
from thinker.training.processes.training_process import TrainingProcess
from thinker.training.reports.plan import make_plan


@dataclass
class PowerLaw:
    """loss = floor + scale · compute^-exponent, with compute in FLOPs and loss in nats per token.

    Kaplan et al. 2020, arXiv:2001.08361; with a floor, Henighan et al. 2020, arXiv:2010.14701.
    """

    floor: float
    scale: float
    exponent: float

    def __call__(self, compute: float | np.ndarray) -> Any:
        """The predicted loss."""
        return self.floor + self.scale * compute**-self.exponent

    @classmethod
    def fit(cls, compute: list[float], losses: list[float], floor: float | None = None) -> PowerLaw:
        """Fit log(loss - floor) by a straight line with least squares; an unknown floor is found by
        a grid search.

        Raises UserError unless there are more points than free parameters, or if the floor is above
        a loss.
        """
        min_points = 4 if floor is None else 3
        if len(losses) < min_points:
            raise UserError(
                f"{len(losses)} sizes are too few to fit a power law; use at least {min_points}"
            )
        if floor is not None and floor >= min(losses):
            raise UserError(
                f"a loss of {min(losses):.4f} is below the floor of {floor:.4f}, so no power law fits"
            )
        x, y = np.log(compute), np.log(losses)
        floors = (
            np.array([floor])
            if floor is not None
            else np.linspace(0, min(losses), 2000, endpoint=False)
        )
        slopes, intercepts = np.polyfit(
            x, np.log(np.array(losses)[:, None] - floors), 1
        )  # (floors,) each
        laws = floors + np.exp(intercepts + slopes * x[:, None])  # (sizes, floors)
        best = np.square(np.log(laws) - y[:, None]).sum(axis=0).argmin()
        return cls(float(floors[best]), float(np.exp(intercepts[best])), float(-slopes[best]))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark."""
    parser.add_argument("config", type=Path, metavar="CONFIG", help="YAML file shared by all sizes")
    parser.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="override keys of the config"
    )
    shapes = {
        "default": "48x2x2,64x3x2,96x3x3,128x4x4,192x4x6",
        "metavar": "WIDTHxLAYERSxHEADS,...",
    }
    parser.add_argument("--shapes", **shapes, help="model sizes")
    budget = parser.add_mutually_exclusive_group()
    budget.add_argument(
        "--tokens-per-parameter", type=float, help="training tokens (default: 20, compute-optimal)"
    )
    budget.add_argument(
        "--minutes", type=float, help="total training time instead of --tokens-per-parameter"
    )
    parser.add_argument(
        "--jobs", type=int, default=1, help="training runs in parallel, which share the cores"
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("runs/scaling"),
        help="folder for runs; finished runs are reused",
    )
    parser.add_argument(
        "--png", type=Path, metavar="FILE", help="plot to write (default: scaling.png in --folder)"
    )


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Plan the sizes, train them, fit the power law, plot it and print a table."""
    sizes = []
    for shape, shape_overrides in parse_shapes(arguments.shapes).items():
        overrides = [*arguments.overrides, *shape_overrides, "train.max_minutes=null"]
        config = load_config(arguments.config, [*overrides, "train.max_steps=1"])
        sizes.append((shape, overrides, make_plan(config, measure=arguments.minutes is not None)))
    ratio = arguments.tokens_per_parameter or 20.0
    if arguments.minutes:
        seconds = sum(
            plan["parameters"] / plan["trained_tokens_per_second"] for _, _, plan in sizes
        )
        ratio = (
            60 * arguments.minutes / seconds
        )  # concurrent runs share the cores whose speed was measured
    runs = []
    for shape, overrides, plan in sizes:
        steps = max(1, round(ratio * plan["parameters"] / plan["tokens_per_step"]))
        overrides = [*overrides, f"train.max_steps={steps}"]
        runs.append(
            TrainingProcess(
                shape, arguments.config, overrides, arguments.folder / f"{shape}-{steps}"
            )
        )
    train_all(
        runs[::-1], arguments.jobs
    )  # the largest first, so that it does not run alone at the end

    rows = []
    for run, (shape, _, plan) in zip(runs, sizes):
        tokens = run.final["tokens"]
        row = {"shape": shape, "parameters": plan["parameters"], "tokens": tokens,
               "flops": plan["flops_per_token"] * run.final["processed_tokens"], "loss": run.loss,
               "seconds": run.final["elapsed_s"]}  # fmt: skip
        rows.append(row)
        print(
            f"{shape:<12} {row['parameters']:>12,} parameters {tokens:>14,} tokens {row['flops']:.2e} FLOPs "
            f"{row['loss']:.4f} nats {row['seconds']:8.0f} s"
        )
    entropy = runs[-1].final.get("entropy_floor")
    law = PowerLaw.fit([row["flops"] for row in rows], [row["loss"] for row in rows], entropy)
    floor_name = "fitted floor" if entropy is None else "entropy of the corpus"
    print(
        f"loss = {law.floor:.3f} + {law.scale:.3g} · FLOPs^-{law.exponent:.3f} ({floor_name}: {law.floor:.3f})"
    )
    print(
        f"at ten times the compute of the largest model, the law predicts {law(10 * rows[-1]['flops']):.3f} nats"
    )
    png = arguments.png or arguments.folder / "scaling.png"
    plot(runs, rows, law, floor_name, png)
    print(f"plot {png}")
    result = {
        "config": arguments.config.name,
        "tokens_per_parameter": ratio,
        "rows": rows,
        "floor": law.floor,
    }
    return result | {
        "floor_known": entropy is not None,
        "scale": law.scale,
        "exponent": law.exponent,
    }


def plot(
    runs: list[TrainingProcess],
    rows: list[dict[str, Any]],
    law: PowerLaw,
    floor_name: str,
    path: Path,
) -> None:
    """Loss by compute on log axes: the curve and end of each run, the power law and its floor."""
    from matplotlib import colormaps

    figure, (axes,) = new_figure(8, 5)
    for number, (run, row) in enumerate(zip(runs, rows)):
        color = colormaps["viridis"](number / max(1, len(rows) - 1) * 0.85)
        flops_per_token = row["flops"] / row["tokens"]
        axes.plot([flops_per_token * line["tokens"] for line in run.curve], [line["val_loss"] for line in run.curve],
                  color=color, alpha=0.5, linewidth=1)  # fmt: skip
        axes.plot(row["flops"], row["loss"], color=color, marker="o", linestyle="",
                  label=f"{row['parameters'] / 1e6:.2g} M parameters, {row['loss']:.3f}")  # fmt: skip
    compute = np.geomspace(rows[0]["flops"] / 2, rows[-1]["flops"] * 10)
    axes.plot(compute, law(compute), color=ORANGE, linestyle="--",
              label=f"{law.floor:.3f} + {law.scale:.3g} · FLOPs$^{{-{law.exponent:.3f}}}$")  # fmt: skip
    axes.axhline(law.floor, color=GREY, linestyle=":", label=f"{floor_name}, {law.floor:.3f}")
    top = max(row["loss"] for row in rows) * 1.3
    bottom = max(law.floor * 0.95, 0.6 * law(compute[-1]))
    axes.set(
        xscale="log",
        yscale="log",
        ylim=(bottom, top),
        xlabel="training FLOPs",
        ylabel="loss (nats per token)",
    )
    ticks = [
        tick
        for tick in (0.5, 0.7, 0.8, 0.9, 1, 1.2, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8)
        if bottom < tick < top
    ]
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path)
