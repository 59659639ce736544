"""The command line of the benchmarks: a sub-command for each, and one line of JSON at the end."""

import argparse
from importlib import import_module

from thinker.benchmarks.environment import record_result
from thinker.runtime.cli import output_file, png_file

BENCHMARKS = (
    "ablation", "attention", "bigram", "checkpoint_overhead", "comm_volume", "decode", "decode_lengths",
    "extrapolation", "gpu", "html_report", "linear_cross_entropy", "scaling", "short_context", "speculative",
    "sweep", "time_to_loss", "train",
)  # fmt: skip


def main() -> int:
    """Run the chosen benchmark and record its result. Returns the exit status."""
    parser = argparse.ArgumentParser(description="Runs one benchmark. The last line of its output is JSON.")
    commands = parser.add_subparsers(dest="benchmark", metavar="BENCHMARK", required=True)
    for name in BENCHMARKS:
        module = import_module(f"thinker.benchmarks.{name}")
        summary = module.__doc__.strip().splitlines()[0]
        command = commands.add_parser(name, help=summary, description=summary)
        module.add_arguments(command)
        if name != "gpu":  # which writes several files
            command.add_argument("--out", type=output_file, metavar="FILE", help="append the line of JSON to this file")
        command.set_defaults(run_benchmark=module.run)
    arguments = parser.parse_args()
    if getattr(arguments, "png", None) is not None:
        png_file(arguments.png)
    out = None if arguments.benchmark == "gpu" else arguments.out
    record_result(arguments.benchmark, arguments.run_benchmark(arguments), out)
    return 0
