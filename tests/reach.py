"""How much of the package a command loads: python tests/reach.py train | generate RUN | COMMAND ...

A code line holds code: no blank line, no comment, no docstring.
"""

import ast
import io
import json
import os
import subprocess
import sys
import tempfile
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[1]
QUICKSTART = ["train.py", "configs/quickstart.yaml", "train.max_steps=20", "train.max_minutes=null"]
SAMPLE = ["--prompt", "Once upon a time", "--max-new-tokens", "20", "--seed", "1"]
# Runs a script as its own main program, and writes the files of our modules when it ends.
PROGRAM = """
import atexit, json, runpy, sys

def write(name=sys.argv[1]):
    files = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    json.dump([file for file in files if file], open(name, "w"))

atexit.register(write)
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def code_lines(source: str) -> int:
    """The number of lines of a Python source that hold code."""
    lines = set()
    skipped = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in skipped and token.type != tokenize.ENDMARKER:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            if ast.get_docstring(node, clean=False) is None:
                continue
            docstring = node.body[0]
            lines -= set(range(docstring.lineno, docstring.end_lineno + 1))
    return len(lines)


def loaded_files(arguments: list[str], root: Path = ROOT, **variables: str) -> list[Path]:
    """Run a script of ours, and return the files of our package that it has loaded at its end."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "files.json"
        command = [sys.executable, "-c", PROGRAM, str(output), *arguments]
        done = subprocess.run(
            command, cwd=root, env={**os.environ, **variables}, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        files = [Path(file).resolve() for file in json.loads(output.read_text())]
    outside = (root / ".venv", root / "tests")
    return sorted(
        {
            file
            for file in files
            if file.suffix == ".py"
            and file.exists()
            and file.is_relative_to(root)
            and not any(file.is_relative_to(folder) for folder in outside)
        }
        | {root / arguments[0]}
    )


def reach(files: list[Path]) -> int:
    """The code lines of all files together."""
    return sum(code_lines(file.read_text()) for file in files)


def main() -> None:
    kind, *rest = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        if kind == "train":
            arguments = [*QUICKSTART, f"run.dir={folder}/run", *rest]
        elif kind == "generate":
            arguments = ["generate.py", rest[0], *SAMPLE, *rest[1:]]
        else:
            arguments = [kind, *rest]
        files = loaded_files(arguments)
    for n, file in sorted(((code_lines(file.read_text()), file) for file in files), reverse=True):
        print(f"{n:6}  {file.relative_to(ROOT)}")
    print(f"{reach(files):6}  code lines in {len(files)} files")


if __name__ == "__main__":
    main()
