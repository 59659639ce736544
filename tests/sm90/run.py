"""Run the tests of this folder: python tests/sm90/run.py [paths and options of pytest].

All but test_fused_kernels.py need torch's CUDA build.
"""

import sys
from pathlib import Path

FOLDER = Path(__file__).parent
sys.path[:0] = [str(FOLDER), str(FOLDER.parent)]

import lowering  # noqa: E402, F401 - before torch
import pytest  # noqa: E402

if __name__ == "__main__":
    has_path = any(Path(argument.split("::")[0]).exists() for argument in sys.argv[1:])
    paths = [] if has_path else [str(FOLDER)]
    sys.exit(pytest.main(["-p", "no:cacheprovider", "--show-capture=no", *sys.argv[1:], *paths]))
