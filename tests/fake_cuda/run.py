"""Run the tests of this folder: python tests/fake_cuda/run.py [paths and options of pytest]."""

import sys
from pathlib import Path

FOLDER = Path(__file__).parent
sys.path[:0] = [str(FOLDER), str(FOLDER.parent)]

import fake_cuda  # noqa: E402, F401 - before torch
import pytest  # noqa: E402

if __name__ == "__main__":
    has_path = any(Path(argument.split("::")[0]).exists() for argument in sys.argv[1:])
    sys.exit(
        pytest.main(
            [
                "-p",
                "no:cacheprovider",
                "-p",
                "gpu_fixture",
                "--show-capture=no",
                *sys.argv[1:],
                *([] if has_path else [str(FOLDER)]),
            ]
        )
    )
