"""A feature can be deleted: its folder, its tests and its line in the list go; everything else
works."""

import hashlib
import json
import os
import re
import subprocess
import sys

import pytest
from conftest import ROOT
from repository_copy import copy_repository

from thinker.runtime.registry import features

NAMES = [feature.name for feature in features()]
pytestmark = pytest.mark.skipif(
    not (NAMES and (ROOT / ".git").exists()), reason="there is nothing to delete, or no repository"
)
DOCS = "not python_run and not search"  # tests of the documentation that take seconds
QUICKSTART = ["train.py", "configs/quickstart.yaml", "train.max_minutes=null"]


def dependents(name):
    """The feature, and all that build on it."""
    gone = {name}
    while True:
        more = {one.name for one in features() if gone & set(one.builds_on)} - gone
        if not more:
            return gone
        gone |= more


def copy_without(names, folder):
    """A copy of the repository without these features."""
    rooms = [f"{room}/{name}" for name in names for room in ("features", "tests/features")]
    copy_repository(folder, rooms)
    init = folder / "features" / "__init__.py"
    text = init.read_text()
    for name in names:
        assert f'    "{name}",\n' in text, name
        text = text.replace(f'    "{name}",\n', "")
    init.write_text(re.sub(r"\[\s*\]", "[]", text))
    (folder.parent / "thinker").symlink_to(folder)
    make_pages(folder)
    return folder


def run_in(folder, *arguments):
    """Run Python in a copy, whose package is `thinker` there. Returns what it printed."""
    program = [sys.executable, *map(str, arguments)]
    variables = {"PYTHONPATH": str(folder.parent), "OMP_NUM_THREADS": "1"}
    environment = {**os.environ, **variables}
    done = subprocess.run(program, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def make_pages(folder):
    run_in(folder, "scripts/make_reference.py")


def run_suite(folder):
    shown = run_in(folder, "-m", "pytest", "-m", "not more", "-n", "2", "--dist", "worksteal")
    assert " passed" in shown
    run_docs(folder)


def run_docs(folder):
    """Links, navigation, generated pages and the site."""
    assert " passed" in run_in(folder, "-m", "pytest", "tests/test_docs.py", "-v", "-k", DOCS)


def facts_of_quickstart(folder, steps):
    """Losses of a quickstart in a copy, and the hashes of its last checkpoint's tensors."""
    run = folder.parent / "quickstart"
    cache = ROOT / ".cache"
    run_in(
        folder, *QUICKSTART, f"train.max_steps={steps}", f"run.dir={run}", f"data.cache_dir={cache}"
    )
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [line.get("train_loss", line.get("val_loss")) for line in lines]
    files = sorted((run / "checkpoints" / f"step-{steps:08d}").glob("*.safetensors"))
    assert files
    return losses, [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]


@pytest.mark.stress
def test_without_any_feature_the_road_trains_the_quickstart_to_the_same_bits(tmp_path):
    bare = copy_without(NAMES, tmp_path / "bare" / "clone")
    full = copy_without([], tmp_path / "full" / "clone")
    assert facts_of_quickstart(bare, 200) == facts_of_quickstart(full, 200)
    run = bare.parent / "quickstart"
    assert run_in(bare, "generate.py", run, "--max-new-tokens", "20", "--seed", "1").strip()


@pytest.mark.stress
def test_without_any_feature_the_suite_passes(tmp_path):
    run_suite(copy_without(NAMES, tmp_path / "bare" / "clone"))


@pytest.mark.stress
@pytest.mark.parametrize("name", NAMES)
def test_without_one_feature_the_suite_passes(name, tmp_path):
    run_suite(copy_without(sorted(dependents(name)), tmp_path / name / "clone"))


def test_without_any_feature_a_run_trains_and_samples(train_args, tmp_path):
    """The short form of the tests above."""
    bare = copy_without(NAMES, tmp_path / "bare" / "clone")
    _, _, *overrides = map(str, train_args)
    config = bare / "tests" / "fixtures" / "base.yaml"
    run = tmp_path / "run"
    run_in(bare, "train.py", config, *overrides, f"run.dir={run}", "train.max_steps=3")
    assert (run / "checkpoints" / "step-00000003").is_dir()
    run_in(bare, "generate.py", run, "--max-new-tokens", "5", "--seed", "1")
