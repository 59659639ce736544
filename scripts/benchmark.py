"""Run one benchmark: python scripts/benchmark.py decode."""

from thinker.runtime.errors import run_command


def main() -> int:
    """Run it. Returns the exit status."""
    from thinker.benchmarks.command import main

    return main()


if __name__ == "__main__":
    run_command(main)
