"""Wheels and source distributions, built in an environment that begins empty."""

import os
import re
import subprocess
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
from conftest import ROOT
from repository_copy import copy_repository

pytestmark = pytest.mark.stress


class Environment:
    """A virtual environment with pip and nothing else."""

    def __init__(self, folder: Path):
        venv.create(folder, with_pip=True)
        self.python = folder / "bin" / "python"

    def run(self, *arguments, cwd, **variables):
        return subprocess.run(
            [self.python, *map(str, arguments)], cwd=cwd, env={**os.environ, **variables},
            capture_output=True, text=True, errors="replace",
        )  # fmt: skip

    def pip(self, *arguments, cwd=ROOT):
        done = self.run("-m", "pip", "--disable-pip-version-check", *arguments, cwd=cwd)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def build_wheel(environment, source, folder):
    environment.pip("wheel", "--no-deps", "--wheel-dir", folder, source)
    (wheel,) = folder.glob("thinker-*.whl")
    return wheel


def metadata(wheel):
    with zipfile.ZipFile(wheel) as content:
        (name,) = (each for each in content.namelist() if each.endswith(".dist-info/METADATA"))
        return content.read(name).decode()


def files(wheel):
    with zipfile.ZipFile(wheel) as content:
        return sorted(content.namelist())


@pytest.fixture(scope="module")
def builder(tmp_path_factory):
    environment = Environment(tmp_path_factory.mktemp("builder"))
    environment.pip("install", "build")
    return environment


@pytest.fixture(scope="module")
def wheel(builder, tmp_path_factory):
    """Of an archive without git."""
    source = copy_repository(tmp_path_factory.mktemp("archive"))
    return build_wheel(builder, source, tmp_path_factory.mktemp("wheel"))


def test_the_source_distribution_builds_the_same_wheel(builder, wheel, tmp_path):
    source = copy_repository(tmp_path / "source")
    done = builder.run("-m", "build", "--sdist", "--outdir", tmp_path, cwd=source)
    assert done.returncode == 0, done.stderr
    (archive,) = tmp_path.glob("thinker-*.tar.gz")
    with tarfile.open(archive) as content:
        names = {name.split("/", 1)[1] for name in content.getnames() if "/" in name}
    assert {"LICENSE", "README.md", "pyproject.toml", "py.typed", "native/decode.c"} <= names
    from_archive = build_wheel(builder, archive, tmp_path / "again")
    assert files(from_archive) == files(wheel)
    assert metadata(from_archive) == metadata(wheel)
    assert "thinker/py.typed" in files(wheel)
    assert wheel.stat().st_size < 2_000_000


def test_versions_come_from_tags(builder, wheel, tmp_path):
    assert "\nVersion: 0.1.0\n" in metadata(wheel)  # of an archive
    source = copy_repository(tmp_path / "source")

    def git(*arguments):
        who = ["-c", "user.name=a", "-c", "user.email=a@b.example"]
        subprocess.run(["git", *who, *arguments], cwd=source, check=True, capture_output=True)

    git("init")
    git("add", ".")
    git("commit", "-m", "first")
    without_tag = build_wheel(builder, source, tmp_path / "without")
    assert re.search(r"\nVersion: 0\.1\.\S*dev1\+g\w+\n", metadata(without_tag))
    git("clean", "-xfd")
    git("tag", "v9.8.7")
    with_tag = build_wheel(builder, source, tmp_path / "with")
    assert "\nVersion: 9.8.7\n" in metadata(with_tag)
    assert files(with_tag) == [
        name.replace("thinker-0.1.0.", "thinker-9.8.7.") for name in files(wheel)
    ]
