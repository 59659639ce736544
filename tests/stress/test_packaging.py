"""Distributions, extras and both ends of the range of torch, in environments that begin empty."""

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
# If it can be reached, torch comes without the libraries of CUDA, and is a tenth of the size.
CPU_INDEX = ["--extra-index-url", "https://download.pytorch.org/whl/cpu", "--retries", "0"]
# By extra, what needs it. Each prints the remedy if the extra is missing.
USES = {
    "wandb": "from thinker.training.tracking.tracker import require_package as use; use('wandb', 'key')",
    "tensorboard": "from thinker.training.tracking.tracker import require_package as use; use('tensorboard', 'key')",
    "trackio": "from thinker.training.tracking.tracker import require_package as use; use('trackio', 'key')",
    "hf": "from thinker.interop.verify_export import verify_hf_export as use; use('no-folder', None, None)",
    "gguf": "from thinker.interop.gguf.gguf_quantization import check_dtype as use; use('f32')",
    "eval": "from thinker.commands.eval_command import evaluate_tasks as use; use(None, None, None)",
    "inspect": "import torch; from thinker.interpretability.flow import max_flow as use; use(torch.eye(3)[None, None])",
    "clean": "from thinker.features.cleaning.near_duplicates import NearDuplicates as use; use(Path('.'))",
    "serve": "from thinker.serving.__main__ import import_libraries as use; use()",
    "lessons": "from thinker.lessons.build import main as use; sys.argv[1:] = ['--only', '01', '--out', 'out', '--fast']; use()",
}
TRY = """
import sys
from pathlib import Path
from thinker import UserError

for line in sys.argv[1].splitlines():
    extra, code = line.split(" ", 1)
    try:
        exec(code)
    except UserError as error:
        print(extra, "refused", error)
    except ImportError as error:
        print(extra, "failed", error)
    except Exception:  # it got as far as its arguments, which are none
        print(extra, "imported")
    else:
        print(extra, "imported")
"""
# What a run, its samples and its checkpoints need of torch.
CORE = [
    "tests/checkpoint",
    "tests/generation/test_batch_sampling.py",
    "tests/generation/test_decoder_contract.py",
    "tests/generation/test_engine.py",
    "tests/generation/test_native_decode.py",
    "tests/model/kernels",
    "tests/model/test_attention_dispatch.py",
    "tests/model/test_kv_cache.py",
    "tests/model/test_transformer.py",
    "tests/training/test_kernels.py",
    "tests/training/test_muon.py",
    "tests/training/test_optimizers.py",
    "tests/training/test_resume.py",
    "tests/training/test_step.py",
]
# What these tests import beside thinker[serve].
TOOLS = ["pytest", "hypothesis", "jsonschema", "tabulate"]


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


def test_each_extra_installs_what_its_remedy_says(wheel, tmp_path):
    environment = Environment(tmp_path / "venv")
    environment.pip("install", *CPU_INDEX, "torch==2.13.0")  # as in requirements.txt
    environment.pip("install", wheel)
    environment.pip("uninstall", "--yes", "networkx")  # which torch brings, too
    provided = re.findall(r"^Provides-Extra: (\w+)$", metadata(wheel), re.MULTILINE)
    assert {*provided} == {*USES, "all"}
    version = environment.run("-c", "import thinker; print(thinker.__version__)", cwd=tmp_path)
    assert version.stdout == "0.1.0\n"

    def results():
        lines = "\n".join(f"{extra} {code}" for extra, code in USES.items())
        done = environment.run("-c", TRY, lines, cwd=tmp_path, HF_HUB_OFFLINE="1")
        assert done.returncode == 0, done.stderr
        return dict(
            line.split(" ", 1) for line in done.stdout.splitlines() if line.split(" ")[0] in USES
        )

    before = results()
    for extra in USES:
        command = f"pip install 'thinker[{extra}]'"
        assert before[extra].startswith("refused"), extra
        assert command in before[extra]
        environment.pip("install", command.split("'")[1], cwd=tmp_path)
    assert results() == dict.fromkeys(USES, "imported")


@pytest.mark.parametrize("version", ["==2.11.*", ">=2.11"], ids=["oldest", "newest"])
def test_the_core_of_the_suite_with_the_oldest_and_the_newest_torch(version, tmp_path):
    environment = Environment(tmp_path / "venv")
    environment.pip("install", *CPU_INDEX, f"torch{version}")
    source = copy_repository(tmp_path / "source")
    environment.pip("install", "-e", f"{source}[serve]", *TOOLS)
    found = environment.run("-c", "import torch; print(torch.__version__)", cwd=tmp_path).stdout
    print(f"torch {found.strip()}")
    done = environment.run(
        *("-m", "pytest", "-o", "addopts=", "-q", "-m", "not more", *CORE),
        cwd=source, OMP_NUM_THREADS="1",
    )  # fmt: skip
    assert done.returncode == 0, f"torch {found}{done.stdout[-4000:]}"
