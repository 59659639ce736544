"""Every command from a wheel in an empty environment, and the page on Python: no checkout is near."""

import os
import re
import subprocess
import sys
import venv

import pytest
from conftest import ROOT
from repository_copy import copy_repository

pytestmark = pytest.mark.stress
SCRIPT = ROOT / "tests" / "stress" / "installed_commands.sh"
PAGE = ROOT / "docs" / "guides" / "python.md"
EXTRAS = "hf,gguf,serve"


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """A virtual environment in which pip installed the wheel and what it asks for."""
    folder = tmp_path_factory.mktemp("installed")
    source = copy_repository(folder / "source")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", folder, source], check=True)
    (wheel,) = folder.glob("thinker-*.whl")
    venv.create(folder / "venv", with_pip=True)
    python = folder / "venv" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", f"{wheel}[{EXTRAS}]"], check=True)
    return folder


def test_the_wheel_is_small(environment):
    (wheel,) = environment.glob("thinker-*.whl")
    assert wheel.stat().st_size < 2_000_000


def test_all_commands(environment, tmp_path, capsys):
    blocks = re.findall(r"(?ms)^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"))
    (tmp_path / "page.py").write_text("\n".join(blocks), encoding="utf-8")
    path = f"{environment / 'venv' / 'bin'}{os.pathsep}{os.environ['PATH']}"
    variables = {"PATH": path, "HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "2"}
    with capsys.disabled():  # the transcript, as a user sees it
        done = subprocess.run(
            ["bash", SCRIPT],
            cwd=tmp_path,
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        print(done.stdout)
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1] == "all commands ran"
    assert str(ROOT) not in done.stdout
