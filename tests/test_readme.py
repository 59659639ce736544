"""What the README promises: its commands run, in its order, and it stays short. Python of the first steps runs, too."""

import re
import shlex
import subprocess
import sys
import textwrap

import pytest
from conftest import ROOT, TINY_OVERRIDES, run_script

TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = [match.replace("\\\n", " ") for match in re.findall(r"(?m)(?:^    .*\n)+", TEXT)]
COMMANDS = [line.strip() for block in BLOCKS for line in block.splitlines() if ".venv/bin/" in line]
GUIDE = (ROOT / "docs" / "getting-started.md").read_text(encoding="utf-8")
PYTHON = [block for block in re.findall(r"(?m)(?:^(?:    .*)?\n)+", TEXT + GUIDE) if "import" in block]
# Smaller, and without what this machine may lack; everything else is as in the README.
SMALLER = {
    "train.py": ["train.max_steps=2", "train.max_minutes=null", "train.device=cpu", "train.compile=false"],
    "gpu-124m": [
        *TINY_OVERRIDES,
        "data.source=pysource",
        "data.path=null",
        "data.config=null",
        "data.max_documents=20",
        "data.val_fraction=0.2",
        "model.vocab_size=null",
        "train.micro_batch_size=null",
    ],
    "finetune.yaml": ["train.batch_size=2"],
    "plan.py": ["--no-steps"],
    "wandb": ["tracking.wandb=offline", "run.dir=runs/tracked"],
    "eval.py": ["--max-tokens", "300"],
    "generate.py": ["--max-new-tokens", "3"],
}
NOT_HERE = {"pip install": "a download", "--tasks": "a download", "torchrun --nproc-per-node gpu": "needs a GPU"}


def test_it_is_short():
    lines = TEXT.splitlines()
    assert len(lines) <= 150
    assert len(TEXT.split()) <= 1400
    assert [line for line in lines if line.startswith("|") and len(line) > 200] == []


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with what the README's commands read: the run of the quickstart, a text, conversations, the configs."""
    folder = tmp_path_factory.mktemp("readme")
    (folder / "configs").symlink_to(ROOT / "configs")
    (folder / "scripts").symlink_to(ROOT / "scripts")
    tales = ["data.max_documents=3000", "model.d_model=48"]
    done = run_script(ROOT / "train.py", "configs/quickstart.yaml", *tales, *SMALLER["train.py"], cwd=folder)
    assert done.returncode == 0, done.stderr
    (folder / "my.txt").write_text("Some words, and a few more of them.\n" * 500)
    (folder / "story.txt").write_text("Once upon a time")
    row = '{"messages": [{"role": "user", "content": "Who is %d?"}, {"role": "assistant", "content": "A girl."}]}\n'
    (folder / "talks.jsonl").write_text("".join(row % number for number in range(200)))
    return folder


def command_of(line, variables):
    """The README's command as a list, smaller."""
    words = [variables.get(word, word) for word in shlex.split(line, comments=True)]
    words += [word for name, more in SMALLER.items() if name in line for word in more]
    if "--score" in words:
        words = words[: -len(SMALLER["generate.py"])]
    return words


def test_its_commands_run(folder):
    variables = {"$P": re.search(r'(?m)^    P="(.*)"$', TEXT)[1]}
    assert len(COMMANDS) > 15
    for line in COMMANDS:
        if any(name in line.split("  #")[0] for name in NOT_HERE):
            continue
        program, *words = command_of(line, variables)
        if program.endswith("torchrun"):
            words = [sys.executable, "-m", "torch.distributed.run", *words]
            words[words.index("train.py")] = str(ROOT / "train.py")
            done = subprocess.run(words, cwd=folder, capture_output=True, text=True)
        else:
            words[0] = str(ROOT / words[0])
            done = run_script(*words, cwd=folder, input="Hello\n")
        assert done.returncode == 0, f"{line}\n{done.stderr}"


@pytest.mark.parametrize("code", PYTHON, ids=["README", "getting started"])
def test_its_python_runs(folder, code):
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
