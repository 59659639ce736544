"""The command train.py: train from a config on the command line."""

from thinker.runtime.errors import run_command
from thinker.training.config.command_line import ConfigArgumentParser
from thinker.training.config.shipped import find_config

EXAMPLES = (
    "quickstart",
    "small-text data.path=my.txt run.dir=runs/mine",
    "runs/mine",
    "--keys train",
)


def main() -> int:
    """Parse the command line and train. Returns the exit status."""
    description = (
        "Train a model from a YAML config. Run the same command again, or give the run, to resume."
    )
    parser = ConfigArgumentParser(description=description, examples=EXAMPLES)
    arguments = parser.parse_command_line()

    find_config(arguments.config)  # before the slow imports, which begin here
    from thinker.training.distributed.session import distributed_session

    with distributed_session() as dist:
        from thinker.training.config.load import check_run_folder, load_config

        config = load_config(arguments.config, arguments.overrides)
        check_run_folder(arguments.config, config, arguments.overrides)
        from thinker.runtime.process.standard_streams import resilient_output
        from thinker.training.run import train

        with resilient_output():
            return train(config, dist)


def command() -> None:
    """Entry point of the installed command: run main() and exit with its status."""
    run_command(main)
