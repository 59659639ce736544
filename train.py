"""Train a Thinker: python train.py CONFIG.yaml [section.key=value ...]."""

import sys

try:
    from thinker.runtime.errors import run_command
    from thinker.training.command_line import ConfigArgumentParser
except ModuleNotFoundError:
    print("error: run `make demo` once and then .venv/bin/python, or pip install -r requirements.txt", file=sys.stderr)
    sys.exit(2)


def main() -> int:
    """Parse, build, run. Returns the exit status."""
    parser = ConfigArgumentParser(
        description="Train a Thinker from a YAML config. The same command again resumes the run.",
        epilog="Example: python train.py configs/text.yaml data.path=my.txt run.dir=runs/mine",
    )
    arguments = parser.parse_command_line()

    # Imported after parsing: --help and a wrong flag need not wait for torch.
    from thinker.runtime.process_group import distributed_session

    with distributed_session() as dist:
        from thinker.training.config import check_run_folder, load_config

        config = load_config(arguments.config, arguments.overrides)
        check_run_folder(arguments.config, config, arguments.overrides)
        from thinker.runtime.streams import resilient_output
        from thinker.training.run import train

        with resilient_output():
            return train(config, dist)


def command() -> None:
    """Run main() and exit with its status: the installed command."""
    run_command(main)


if __name__ == "__main__":
    command()
