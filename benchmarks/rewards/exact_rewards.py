"""What train.exact costs and brings: a run that learns from rewards without it and with it, in turns.

Seconds are those of whole steps: answers, their rewards, and the update.
"""

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

from thinker.checkpoint.run_directory import RunDirectory
from thinker.runtime.process.progress import Progress
from thinker.training.config.shipped import find_config
from thinker.training.processes.training_process import TrainingProcess

FORMS = {"ordinary": "train.exact=false", "exact": "train.exact=true"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark."""
    parser.add_argument("config", help="a config with train.grpo, such as grpo")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="more keys")
    parser.add_argument("--steps", type=int, default=12, help="of each run; the first is left out")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each; medians are reported")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Train in turns, and compare tokens per second and mismatches."""
    config = find_config(arguments.config)
    more = [f"train.max_steps={arguments.steps}", "train.log_every=1", "train.save_every=null"]
    more += ["train.precision=fp32", "train.device=cpu", "train.grpo.eval_prompts=0"]
    seconds: dict[str, list[float]] = {name: [] for name in FORMS}
    mismatch = dict.fromkeys(FORMS, 0.0)
    with tempfile.TemporaryDirectory() as folder, Progress(total=2 * arguments.rounds) as bar:
        for turn in range(arguments.rounds):
            for name, override in FORMS.items():
                overrides = [*arguments.overrides, *more, override]
                path = Path(folder) / f"{name}-{turn}"
                process = TrainingProcess(name, config, overrides, path)
                process.train()
                steps = [line for line in RunDirectory(path).read_metrics() if "reward" in line]
                trained = steps[-1]["elapsed_s"] - steps[0]["elapsed_s"]
                seconds[name].append(trained / (len(steps) - 1))
                largest = max(step["policy_mismatch"] for step in steps)
                mismatch[name] = max(mismatch[name], largest)
                bar.update()
    train = process.resolved["train"]
    tokens = statistics.fmean(step["answer_tokens"] for step in steps)
    result: dict[str, Any] = {
        "verifier": "+".join(train["grpo"]["rewards"]),
        "answers": train["batch_size"],
        "answer_tokens": tokens,
    }
    for name in FORMS:
        speed = train["batch_size"] * tokens / statistics.median(seconds[name])
        result[f"{name}_tokens_per_second"] = speed
        result[f"{name}_mismatch"] = mismatch[name]
        print(f"{name:<10} {speed:10,.0f} tokens/s, largest mismatch {mismatch[name]:.2g}")
    result["ratio"] = result["exact_tokens_per_second"] / result["ordinary_tokens_per_second"]
    print(f"train.exact has {result['ratio']:.2f} of the speed")
    return result
