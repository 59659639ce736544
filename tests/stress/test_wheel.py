"""The researcher's list, with an installed wheel and no clone: the page "Change the model" in a
folder of its own."""

import json
import os
import re
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from conftest import ROOT
from repository_copy import copy_repository

PAGE = ROOT / "docs" / "guides" / "change-the-model.md"
BLOCK = re.compile(r"(?ms)^```(\w+)\n(.*?)^```$")
pytestmark = pytest.mark.stress
# Each exporter refuses what its format cannot describe.
EXPORT = """
import sys

from thinker import UserError, load
from thinker.interop.gguf.write_gguf import write_gguf
from thinker.interop.huggingface import save_pretrained

model, tokenizer = load(sys.argv[1])
for export in (save_pretrained, write_gguf):
    try:
        export(model, tokenizer, "exported")
    except UserError as error:
        assert "\\n" not in str(error)
        print(export.__name__, error)
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """A virtual environment with the wheel, which borrows all other packages."""
    folder = tmp_path_factory.mktemp("wheel")
    source = copy_repository(folder / "source")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    build = ["wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(source)]
    subprocess.run([*pip, *build], check=True)
    (wheel,) = folder.glob("thinker-*.whl")
    venv.create(folder / "venv", with_pip=False)
    python = folder / "venv" / "bin" / "python"
    subprocess.run(
        [*pip, "--python", str(python), "install", "--no-deps", "--no-index", str(wheel)],
        check=True,
    )
    (packages,) = (folder / "venv" / "lib").glob("*/site-packages")
    borrowed = [path for path in sys.path if Path(path).name == "site-packages"]
    (packages / "borrowed.pth").write_text("\n".join(borrowed))
    return python.parent


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """The files of the page in a folder."""
    folder = tmp_path_factory.mktemp("project")
    for _, code in BLOCK.findall(PAGE.read_text(encoding="utf-8")):
        named = re.match(r"# (\w+\.(?:py|yaml))\n", code)
        if named:
            (folder / named[1]).write_text(code)
    return folder


@pytest.fixture
def run(environment, project):
    """Runs a command of the wheel in the folder, and returns what it printed."""

    def run(command, *arguments):
        variables = {"PATH": f"{environment}:{os.environ['PATH']}", "HOME": str(project)}
        done = subprocess.run(
            [environment / command, *map(str, arguments)],
            cwd=project,
            env=variables,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout, done.stderr

    return run


def test_the_package_is_the_wheel(run, environment):
    shown, _ = run("python", "-c", "import thinker; print(thinker.__file__)")
    assert shown.startswith(str(environment.parent))


def test_parts_of_the_user_are_trained_reopened_and_not_exported_as_something_else(run, project):
    few_steps = ["train.max_steps=30", "train.max_minutes=null", "train.device=cpu"]
    run("thinker-train", "mine.yaml", *few_steps)
    lines = (project / "runs" / "mine" / "metrics.jsonl").read_text().splitlines()
    losses = [line["train_loss"] for line in map(json.loads, lines) if "train_loss" in line]
    assert losses[-1] < losses[0] - 0.5
    _, shown = run("thinker-train", "runs/mine", "train.max_steps=31")
    assert "resuming from step 30 in runs/mine" in shown
    sample = ["runs/mine", "--prompt", "Once", "--seed", "1", "--max-new-tokens", "20"]
    text, _ = run("thinker-generate", *sample)
    assert run("thinker-generate", *sample, "--no-cache")[0] == text
    refusals, _ = run("python", "-c", EXPORT, "runs/mine")
    assert [line.split()[0] for line in refusals.splitlines()] == ["save_pretrained", "write_gguf"]


def test_an_objective_a_callback_a_dataset_and_an_optimizer_of_the_user(run, project):
    run("python", "train_with_penalty.py")
    (state,) = (project / "runs" / "penalty" / "checkpoints").glob("step-00000020/state.json")
    assert '"counted_steps": 20' in state.read_text()
    metrics = (project / "runs" / "penalty" / "metrics.jsonl").read_text()
    assert '"penalty"' in metrics
    run("python", "train_on_sums.py")
    for folder in ("runs/counting", "models/counting"):
        run("thinker-generate", folder, "--prompt", "Once", "--max-new-tokens", "5")
