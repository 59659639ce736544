"""Find learning rates and a batch size on short runs: python scripts/tune.py CONFIG
[section.key=value ...]."""

from pathlib import Path

from thinker.runtime.errors import run_command
from thinker.runtime.plot_style import png_file
from thinker.training.config.command_line import ConfigArgumentParser


def main() -> int:
    """Search, and print and plot the result. Returns the exit status."""
    examples = (
        "configs/small-text.yaml data.path=my.txt --minutes 10",
        "configs/quickstart.yaml --batch-sizes 14",
    )
    description = (
        "Find the learning rates and the batch size of a config by successive "
        "halving on short runs."
    )
    parser = ConfigArgumentParser(description=description, examples=examples)
    group = parser.add_argument_group("search")
    group.add_argument(
        "--minutes", type=float, default=10.0, help="time limit of the whole search in minutes"
    )
    multipliers_help = "factors by which to multiply the config's learning rates"
    group.add_argument(
        "--multipliers", default="0.35,0.5,0.7,1,1.4,2", metavar="X,X,...", help=multipliers_help
    )
    batch_sizes_help = (
        "batch sizes to try (default: half the config's, the config's, and twice that)"
    )
    group.add_argument("--batch-sizes", metavar="N,N,...", help=batch_sizes_help)
    jobs_help = (
        "training runs in parallel (default: one per core on a CPU, if memory suffices; 1 on a GPU)"
    )
    group.add_argument("--jobs", type=int, help=jobs_help)
    folder_help = "folder for runs; finished runs are reused (default: runs/NAME-tuning)"
    group.add_argument("--folder", type=Path, help=folder_help)
    group.add_argument(
        "--png",
        type=png_file,
        metavar="FILE",
        help="plot to write (default: tuning.png in --folder)",
    )
    arguments = parser.parse_command_line()
    from thinker.benchmarks.tuning.tuning import tune

    tune(arguments)
    return 0


if __name__ == "__main__":
    run_command(main)
