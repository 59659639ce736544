"""Train a Thinker: python train.py RECIPE.yaml [section.key=value ...]."""

from __future__ import annotations

import argparse

from thinker.runtime.errors import run_command


def main() -> int:
    """Parse, build, run. Returns the exit status."""
    parser = argparse.ArgumentParser(
        description="Train a Thinker from a YAML recipe. The same command again resumes the run.",
        epilog="Example: python train.py configs/quickstart.yaml data.source=text data.path=my.txt run.dir=runs/mine",
    )
    parser.add_argument("recipe", help="a YAML file, such as configs/quickstart.yaml")
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="section.key=value", help="keys of the recipe, replaced"
    )
    arguments = parser.parse_args()

    from thinker.runtime.process_group import joined  # after parsing: --help and a wrong flag need not wait for torch

    with joined() as ranks:
        from thinker.training.config import load_recipe

        recipe = load_recipe(arguments.recipe, arguments.overrides)

        from thinker.training.signals import lasting_output
        from thinker.training.trainer import Trainer

        with lasting_output():
            return Trainer(recipe, ranks).train()


def command() -> None:
    """Run main() and exit with its status: the installed command."""
    run_command(main)


if __name__ == "__main__":
    command()
