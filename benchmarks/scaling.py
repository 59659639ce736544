"""A ladder of sizes, each trained for as many tokens a parameter, and the law that their losses follow."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from thinker.benchmarks.environment import finish
from thinker.benchmarks.training_runs import Training, read_shapes, train_all
from thinker.runtime.errors import UserError
from thinker.runtime.plotting import GREY, ORANGE, new_figure
from thinker.training.config import load_config
from thinker.training.plan import make_plan


@dataclass
class PowerLaw:
    """loss = floor + scale · compute^-exponent (Kaplan et al. 2020, arXiv:2001.08361; with a floor, Henighan et al.
    2020, arXiv:2010.14701). Compute in FLOPs, loss in nats a token."""

    floor: float
    scale: float
    exponent: float

    def __call__(self, compute: float | np.ndarray) -> Any:
        """The loss at so many FLOPs."""
        return self.floor + self.scale * compute**-self.exponent

    @classmethod
    def fit(cls, compute: list[float], losses: list[float], floor: float | None = None) -> PowerLaw:
        """A straight line through log(loss - floor) by least squares; a floor that is not known is searched for.

        Raises UserError where there are fewer points than the law has numbers, plus one.
        """
        needed = 3 if floor is not None else 4
        if len(losses) < needed:
            raise UserError(f"{len(losses)} sizes do not show a law; it takes {needed}")
        if floor is not None and floor >= min(losses):
            raise UserError(f"a loss of {min(losses):.4f} lies below the floor of {floor:.4f}: the fit has no meaning")
        x = np.log(compute)
        floors = [floor] if floor is not None else np.linspace(0, min(losses), 2000, endpoint=False)
        best: tuple[float, PowerLaw] | None = None
        for candidate in floors:
            slope, intercept = np.polyfit(x, np.log(np.array(losses) - candidate), 1)
            law = cls(float(candidate), float(np.exp(intercept)), float(-slope))
            error = float(np.square(np.log(law(np.exp(x))) - np.log(losses)).sum())
            if best is None or error < best[0]:
                best = error, law
        return best[1]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What can be chosen."""
    parser.add_argument("config", type=Path)
    parser.add_argument("overrides", nargs="*", help="section.key=value, for all sizes")
    parser.add_argument("--shapes", default="48x2x2,64x3x2,96x3x3,128x4x4,192x4x6", metavar="WIDTHxLAYERSxHEADS,...")
    budget = parser.add_mutually_exclusive_group()
    budget.add_argument("--tokens-per-parameter", type=float, help="(default 20, the compute-optimal number)")
    budget.add_argument("--minutes", type=float, help="for all trainings together; sets the tokens a parameter")
    parser.add_argument("--jobs", type=int, default=1, help="trainings at a time, the cores shared out")
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/scaling"), help="finished runs there are not repeated"
    )
    parser.add_argument("--png", type=Path, help="the picture (default: scaling.png in the folder)")
    parser.add_argument("--out", type=Path, help="append the line of JSON there")


def run(arguments: argparse.Namespace) -> None:
    """Plan, train, fit, draw; print a table and a line of JSON."""
    rungs = []
    for shape, sizes in read_shapes(arguments.shapes).items():
        overrides = [*arguments.overrides, *sizes, "train.max_minutes=null"]
        config = load_config(arguments.config, [*overrides, "train.max_steps=1"])
        rungs.append((shape, overrides, make_plan(config, measure=arguments.minutes is not None)))
    ratio = arguments.tokens_per_parameter or 20.0
    if arguments.minutes:
        seconds = sum(plan["parameters"] / plan["tokens_per_second"] for _, _, plan in rungs)
        ratio = 60 * arguments.minutes / seconds  # jobs share the cores whose speed was measured
    trainings = []
    for shape, overrides, plan in rungs:
        steps = max(1, round(ratio * plan["parameters"] / plan["tokens_per_step"]))
        trainings.append(
            Training(shape, arguments.config, [*overrides, f"train.max_steps={steps}"],
                     arguments.folder / f"{shape}-{steps}")
        )  # fmt: skip
    train_all(trainings[::-1], arguments.jobs)  # the largest first, so that it does not end alone

    rows = []
    for training, (shape, _, plan) in zip(trainings, rungs):
        rows.append(
            {"shape": shape, "parameters": plan["parameters"], "tokens": training.final["tokens"],
             "flops": plan["flops_per_token"] * training.final["tokens"], "loss": training.loss,
             "seconds": training.final["elapsed_s"]}
        )  # fmt: skip
        print(
            f"{shape:<12} {rows[-1]['parameters']:>12,} parameters {rows[-1]['tokens']:>14,} tokens "
            f"{rows[-1]['flops']:.2e} FLOPs {training.loss:.4f} nats {rows[-1]['seconds']:8.0f} s"
        )
    entropy = trainings[-1].final.get("entropy_floor")
    law = PowerLaw.fit([row["flops"] for row in rows], [row["loss"] for row in rows], entropy)
    known = "the entropy of the corpus" if entropy is not None else "fitted"
    print(f"loss = {law.floor:.3f} + {law.scale:.3g} · FLOPs^-{law.exponent:.3f}, the floor {known}")
    print(f"ten times the largest one's compute: {law(10 * rows[-1]['flops']):.3f} nats, if the law holds")
    png = arguments.png or arguments.folder / "scaling.png"
    draw_scaling(trainings, rows, law, entropy is not None, png)
    print(f"picture {png}")
    result = {"benchmark": "scaling", "config": arguments.config.name, "tokens_per_parameter": ratio, "rows": rows}
    result |= {"floor": law.floor, "floor_known": entropy is not None, "scale": law.scale, "exponent": law.exponent}
    finish(result, arguments.out)


def draw_scaling(trainings: list[Training], rows: list[dict[str, Any]], law: PowerLaw, known: bool, path: Path) -> None:
    """Loss by compute on log axes: every size's curve, their ends, the law through them, and the floor."""
    from matplotlib import colormaps

    figure, (axes,) = new_figure(8, 5)
    for number, (training, row) in enumerate(zip(trainings, rows)):
        colour = colormaps["viridis"](number / max(1, len(rows) - 1) * 0.85)
        each = row["flops"] / row["tokens"]
        axes.plot([each * line["tokens"] for line in training.curve], [line["val_loss"] for line in training.curve],
                  color=colour, alpha=0.5, linewidth=1)  # fmt: skip
        axes.plot(row["flops"], row["loss"], color=colour, marker="o", linestyle="",
                  label=f"{row['parameters'] / 1e6:.2g} M parameters, {row['loss']:.3f}")  # fmt: skip
    compute = np.geomspace(rows[0]["flops"] / 2, rows[-1]["flops"] * 10)
    axes.plot(compute, law(compute), color=ORANGE, linestyle="--",
              label=f"{law.floor:.3f} + {law.scale:.3g} · FLOPs$^{{-{law.exponent:.3f}}}$")  # fmt: skip
    word = "entropy of the corpus" if known else "fitted floor"
    axes.axhline(law.floor, color=GREY, linestyle=":", label=f"{word}, {law.floor:.3f}")
    top = max(row["loss"] for row in rows) * 1.3
    bottom = max(law.floor * 0.95, 0.6 * law(compute[-1]))
    axes.set(xscale="log", yscale="log", ylim=(bottom, top), xlabel="FLOPs of training", ylabel="nats a token")
    ticks = [tick for tick in (0.5, 0.7, 0.8, 0.9, 1, 1.2, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8) if bottom < tick < top]
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path)
