"""Run tests whose kernels in C run on an emulated ARM processor, and report which were called.

run_tests_on_arm.py FOLDER FLAGS TESTS...: FOLDER for what is compiled, FLAGS of the compiler,
separated by commas, and arguments of pytest.
"""

import sys
from pathlib import Path

import pytest
from emulated_library import EmulatedLibrary

from thinker.native import compiler

folder, flags, *tests = sys.argv[1:]
libraries = {}


def compiled(source, signatures, *of_file):
    """As compiler.compiled()."""
    if source not in libraries:
        given = [*flags.split(","), *of_file]
        libraries[source] = EmulatedLibrary(source, signatures, given, Path(folder))
    return libraries[source]


compiler.compiled = compiled  # before thinker.native.training imports it
status = pytest.main(["-p", "no:cacheprovider", *tests])
for library in libraries.values():
    library.close()
for library in libraries.values():
    for name, count in sorted(library.calls.items()):
        print(f"called {name} {count}")
sys.exit(status)
