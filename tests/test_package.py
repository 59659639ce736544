"""The package `thinker`: what a wheel holds, and the names that it offers."""

import importlib.metadata
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from repository_copy import copy_repository

import thinker
from thinker.runtime import errors

ROOT = Path(__file__).parents[1]
NOT_IN_A_WHEEL = {".venv", "build", "tests"}  # `pip install .` leaves build
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
FOLDERS = [path.parent.relative_to(ROOT) for path in ROOT.rglob("__init__.py")]
PACKAGES = [folder for folder in FOLDERS if not {*folder.parts} & NOT_IN_A_WHEEL]
FEATURES = [
    folder for folder in PACKAGES if folder.parts[:1] == ("features",) and len(folder.parts) > 1
]


def test_a_wheel_holds_every_package():
    """It holds features as files, without naming them: each can be deleted."""
    listed = re.search(r"^packages = \[(.*?)\]", PROJECT, re.DOTALL | re.MULTILINE)[1]
    packages = {".".join(["thinker", *folder.parts]) for folder in PACKAGES}
    packages -= {".".join(["thinker", *folder.parts]) for folder in FEATURES}
    assert set(re.findall(r'"(thinker[\w.]*)"', listed)) == packages


def test_a_wheel_holds_the_files_that_packages_read():
    of_data = re.findall(r'^"(thinker[\w.]*)" = \[(.*?)\]', PROJECT, re.MULTILINE)
    included = {
        path
        for package, patterns in of_data
        for pattern in re.findall(r'"(.*?)"', patterns)
        for path in ROOT.joinpath(*package.split(".")[1:]).glob(pattern)
        if path.is_file()
    }
    folders = [ROOT / folder for folder in PACKAGES if folder.parts]
    files = {path for folder in folders for path in folder.iterdir() if path.is_file()}
    pages = [ROOT / room / "page" for room in ("interpretability", "lessons", "runtime", "serving")]
    files |= {path for page in pages for path in page.rglob("*") if path.is_file()}
    files |= set((ROOT / "native" / "tiles").iterdir())
    files |= set((ROOT / "lessons" / "notebooks").iterdir())
    files |= set((ROOT / "configs").iterdir())
    files |= set((ROOT / "benchmarks" / "configs").iterdir())
    files -= {ROOT / "benchmarks" / "leaderboard.md"}  # for readers of the repository
    files -= {ROOT / "lessons" / "README.md"}  # for readers of the repository
    files -= set(ROOT.glob("features/*/guide.md"))  # and of the site
    read = {path for path in files if path.suffix not in (".py", ".pyc")}
    read.add(ROOT / "py.typed")  # so that type checkers read our hints
    for folder in FEATURES:
        read |= set(ROOT.joinpath(folder).rglob("*.py"))
        read |= set(ROOT.joinpath(folder).glob("*.yaml"))
        read |= set(ROOT.joinpath(folder).glob("page/*"))
    assert read == included


@pytest.mark.parametrize("name", thinker.__all__)
def test_public_names_are_documented(name):
    offered = getattr(thinker, name)
    assert len(inspect.getdoc(offered)) > 20
    assert name in dir(thinker)
    if (
        inspect.isclass(offered)
        and not name.endswith(("Config", "Params"))
        and name != "Completion"
    ):
        methods = [
            each
            for each, _ in inspect.getmembers(offered, inspect.isfunction)
            if each in vars(offered)
        ]
        assert [
            each
            for each in methods
            if not each.startswith("_") and not inspect.getdoc(getattr(offered, each))
        ] == []


def test_the_version_is_the_installed_one_and_has_an_answer_without(monkeypatch):
    assert thinker.__version__ == importlib.metadata.version("thinker")

    def not_found(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", not_found)
    assert thinker.__version__ == "0+checkout"


@pytest.mark.parametrize(("system", "quote"), [("posix", "'"), ("nt", '"')])
def test_the_remedy_for_a_missing_extra_fits_the_installation(system, quote, tmp_path, monkeypatch):
    monkeypatch.setattr(errors, "os", SimpleNamespace(name=system))
    assert errors.install_command("serve") == f"pip install {quote}.[serve]{quote}"
    monkeypatch.setattr(errors, "__file__", str(tmp_path / "thinker" / "runtime" / "errors.py"))
    assert errors.install_command("serve") == f"pip install {quote}thinker[serve]{quote}"


COMMANDS = {  # by command, the first package that it misses
    "train quickstart": "pydantic",
    "plan quickstart": "pydantic",
    "generate runs/mine": "numpy",
    "eval runs/mine": "torch",
    "completion bash": "argcomplete",
}
RUN = "from thinker.commands.program import command; command()"
MAKE_DEMO = "run `make demo` and use .venv/bin/python, or pip install -r requirements.txt"


@pytest.fixture(scope="module", params=["installed", "checkout"])
def without_packages(request, tmp_path_factory):
    """Runs a command in a Python with thinker, but none of the packages that it needs. Returns how
    it ended, and what should be said to do."""
    folder = tmp_path_factory.mktemp(request.param)
    copy_repository(folder / "thinker", leave_out=("benchmarks", "docs", "lessons", "tests"))
    remedy = MAKE_DEMO
    if request.param == "installed":
        (folder / "thinker" / "pyproject.toml").unlink()
        remedy = "run pip install thinker"

    def run(*arguments):
        # -S: without site-packages.
        return subprocess.run(
            [sys.executable, "-S", *arguments], cwd=folder, capture_output=True, text=True,
            env={**os.environ, "PYTHONPATH": str(folder)},
        )  # fmt: skip

    return run, remedy


@pytest.mark.parametrize("words", COMMANDS)
def test_the_remedy_for_a_missing_package_fits_the_installation(words, without_packages):
    run, remedy = without_packages
    done = run("-c", f"import sys; sys.argv = ['thinker', *{words.split()}]; {RUN}")
    problem = f"package {COMMANDS[words]} is not installed for {sys.executable}"
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"error: {problem}; {remedy}\n"


@pytest.mark.parametrize("script", ["train.py", "generate.py"])
def test_the_remedy_in_a_checkout_that_is_not_installed(script):
    command = [sys.executable, "-S", ROOT / script, "x"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"error: {MAKE_DEMO}\n")


def test_remedies_name_extras_that_exist():
    listed = re.search(r"\[project.optional-dependencies\]\n(.*?)\n\n", PROJECT, re.DOTALL)[1]
    extras = set(re.findall(r"^(\w+) = ", listed, re.MULTILINE))
    sources = [path for folder in PACKAGES for path in (ROOT / folder).glob("*.py")]
    texts = "\n".join(path.read_text(encoding="utf-8") for path in sources)
    named = set(re.findall(r"""install_command\(["'](\w+)["']\)""", texts))
    assert named
    assert named <= extras


def test_an_unknown_name_is_an_import_error():
    with pytest.raises(ImportError, match="cannot import name 'Thinkr'"):
        exec("from thinker import Thinkr")


def test_importing_the_package_imports_no_torch():
    code = "import sys, thinker; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_installing_says_what_it_waits_for():
    """pip shows its progress, after a line on how long it may take."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert "--quiet" not in makefile
    assert len(re.findall(r'@echo "installing .* a minute or more.*"\n\t\$\(PIP\)', makefile)) == 2
