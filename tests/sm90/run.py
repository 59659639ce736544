"""Run the tests of this folder, with torch's CUDA build: python tests/sm90/run.py [options of
pytest]."""

import sys
from pathlib import Path

FOLDER = Path(__file__).parent
sys.path[:0] = [str(FOLDER), str(FOLDER.parent)]

import lowering  # noqa: E402, F401 - before torch
import pytest  # noqa: E402

if __name__ == "__main__":
    sys.exit(
        pytest.main(["-p", "no:cacheprovider", "--show-capture=no", *sys.argv[1:], str(FOLDER)])
    )
