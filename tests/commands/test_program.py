"""The program `thinker`: its commands, their names, and what they import before they work."""

import json
import subprocess
import sys

import pytest
from conftest import ROOT
from training_runs import assert_same_tensors

import thinker
from thinker.commands.table import GROUPS, all_commands
from thinker.runtime.registry import import_offer
from thinker.training.config.shipped import read_header, shipped_configs

COMMANDS = all_commands()
IMPORTED = """
import sys
before = {name.partition(".")[0] for name in sys.modules}  # by the site, as in an editable install
from thinker.commands.program import main
try:
    main()
except SystemExit:
    pass
after = {name.partition(".")[0] for name in sys.modules}
print(*sorted(after - before - sys.stdlib_module_names), file=sys.stderr)
"""


def run_thinker(*arguments, cwd=ROOT):
    command = [sys.executable, "-m", "thinker", *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True)


def test_the_list_has_every_command_in_its_group():
    done = run_thinker("--help")
    assert done.returncode == 0
    assert done.stdout == run_thinker().stdout == run_thinker("help").stdout
    shown = []
    for line in done.stdout.split("examples:")[0].splitlines():
        if line.startswith("  "):
            shown.append(line[2:].split("  ")[0])
    assert shown == list(COMMANDS)
    for group in GROUPS:
        assert f"\n{group}:\n" in done.stdout
    assert max(len(line) for line in done.stdout.splitlines()) <= 88


@pytest.mark.parametrize("name", COMMANDS)
def test_summaries_are_phrases(name):
    summary = COMMANDS[name].summary
    assert summary[0].islower()
    assert not summary.endswith(".")
    assert COMMANDS[name].group in GROUPS


@pytest.mark.parametrize("name", COMMANDS)
def test_help_imports_only_thinker(name):
    """Each command begins with its parser, and imports the rest when it is needed."""
    command = [sys.executable, "-c", IMPORTED, *name.split(), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.startswith(f"usage: -c {name} [-h]")
    assert set(done.stderr.split()) <= {"thinker"}


def test_names_of_commands_lead_to_functions():
    for command in COMMANDS.values():
        assert callable(import_offer(command.main))


def test_the_version():
    for flag in ("--version", "-V"):
        assert run_thinker(flag).stdout == f"thinker {thinker.__version__}\n"


@pytest.mark.parametrize(
    ("words", "message"),
    {
        ("tran", "quickstart"): "there is no command tran; did you mean train?",
        ("qwerty",): "there is no command qwerty; thinker --help lists them",
        ("map", "runs/x"): "there is no command map; did you mean inspect map?",
        ("train", "README.md"): "README.md is text, not a config; train on it with small-text or",
        ("export", "runs/x"): "thinker export needs one more word; use export hf or export gguf",
        ("--keys",): "thinker has no flag --keys; flags follow the name of a command",
        ("generate", "x", "--promt", "y"): "unrecognized arguments: --promt y; did you mean --prompt?",
        ("train", "quickstrat"): "config quickstrat does not exist; did you mean the config quickstart",
        ("train", "qwerty"): "config qwerty does not exist; give a YAML file, a run, or one of chars,",
        ("train", "tests"): "tests is a folder, but not of a run: it has no config.yaml; give a YAML file",
        ("configs", "show", "smalltext"): "there is no config smalltext; did you mean small-text?",
        ("export", "gguf", "no-run", "x.gguf", "--dtype", "q3"): "argument --dtype: invalid choice: 'q3'",
        ("export", "gguf", "no-run", "x.gguf", "y"): "unrecognized arguments: y (--help",
        ("configs", "--json", "show", "chars"): "--json has no effect on show; remove it",
    }.items(),
)  # fmt: skip
def test_mistakes_are_one_line(words, message):
    done = run_thinker(*words)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith(f"error: {message}")
    assert len(done.stderr.splitlines()) == 1


def test_help_of_the_first_of_two_words():
    for words in (["export", "--help"], ["export", "-h"], ["help", "export"]):
        shown = run_thinker(*words)
        assert shown.returncode == 0
        assert shown.stdout.startswith("usage: python -m thinker export COMMAND")
        for name in ("export hf", "export gguf"):
            assert f"  {name}" in shown.stdout
            assert COMMANDS[name].summary in shown.stdout


def test_help_names_the_command_as_it_was_called():
    """The examples of a command can be pasted."""
    by_program = run_thinker("help", "export", "gguf")
    assert by_program.stdout.startswith("usage: python -m thinker export gguf [-h]")
    assert "\n  python -m thinker export gguf runs/quickstart my-model.gguf\n" in by_program.stdout
    script = [sys.executable, "scripts/export_gguf.py", "--help"]
    by_script = subprocess.run(script, capture_output=True, text=True, cwd=ROOT).stdout
    assert by_script.startswith("usage: export_gguf.py [-h]")
    assert "\n  python scripts/export_gguf.py runs/quickstart my-model.gguf\n" in by_script
    assert (
        by_program.stdout.partition("positional")[2].partition("examples")[0]
        == (by_script.partition("positional")[2].partition("examples")[0])
    )


def test_configs_are_listed_with_hardware(tmp_path):
    done = run_thinker("configs", "--json", cwd=tmp_path)
    listed = {values["name"]: values for values in map(json.loads, done.stdout.splitlines())}
    assert set(listed) == set(shipped_configs())
    for name, values in listed.items():
        assert values["purpose"].endswith("."), name
        assert values["hardware"], name
        assert {"time", "loss"} <= set(values) or "time and loss" in values, name
    text = run_thinker("configs", cwd=tmp_path).stdout
    shown = " ".join(text.split())
    laptop, gpu = text.split("\nfor a GPU:\n")
    assert laptop.splitlines()[2].startswith("quickstart ")
    for name, values in listed.items():
        part = gpu if values["hardware"].startswith("one CUDA GPU") else laptop
        assert f"\n{name} " in part, name
    for name in listed:
        assert f"{name} " in shown


def test_the_facts_of_a_header_are_its_sentences():
    header = read_header(ROOT / "configs" / "quickstart.yaml")
    assert header.purpose.startswith("A first run without network: readable stories")
    assert list(header.facts) == ["hardware", "time", "loss"]
    assert header.facts["time"] == "under 3 minutes of training on two cores."
    text = (ROOT / "configs" / "quickstart.yaml").read_text(encoding="utf-8")
    words = text.partition("\n\n")[0].replace("#", " ").split()
    assert header.facts["loss"].split() == words[words.index("Loss:") + 1 :]


def test_a_copied_config_trains_and_finds_its_schema(tmp_path):
    done = run_thinker("configs", "copy", "quickstart", cwd=tmp_path)
    assert done.stdout.splitlines()[0] == "wrote quickstart.yaml"
    copied = (tmp_path / "quickstart.yaml").read_text(encoding="utf-8")
    original = (ROOT / "configs" / "quickstart.yaml").read_text(encoding="utf-8")
    assert copied.partition("\n")[2] == original.partition("\n")[2]
    schema = copied.partition("\n")[0].partition("$schema=")[2]
    assert json.loads((tmp_path / schema).read_text(encoding="utf-8"))["title"] == "Thinker config"
    again = run_thinker("configs", "copy", "quickstart", cwd=tmp_path)
    assert again.returncode == 2
    assert again.stderr == "error: quickstart.yaml already exists; give another FILE\n"
    template = run_thinker("configs", "copy", "chat.jinja", "mine.jinja", cwd=tmp_path)
    assert template.returncode == 0
    assert (tmp_path / "mine.jinja").read_bytes() == (ROOT / "configs/chat.jinja").read_bytes()


def test_lessons_are_listed_and_copied(tmp_path):
    listed = run_thinker("lessons", cwd=tmp_path).stdout.splitlines()
    notebooks = sorted((ROOT / "lessons" / "notebooks").glob("*.ipynb"))
    numbers = [int(path.name[:2]) for path in notebooks]
    assert [int(line.split()[0]) for line in listed[: len(notebooks)]] == numbers
    assert run_thinker("lessons", "copy", "mine", cwd=tmp_path).returncode == 0
    assert [path.name for path in sorted((tmp_path / "mine").iterdir())] == [
        path.name for path in notebooks
    ]
    again = run_thinker("lessons", "copy", "mine", cwd=tmp_path)
    assert again.stderr == "error: mine already exists; give a new or empty folder\n"


# As pip writes the script thinker-train (pyproject.toml).
THINKER_TRAIN = "import sys; from thinker.training.command import command; sys.exit(command())"
FORMS = {
    "thinker train": ["-m", "thinker", "train"],
    "thinker-train": ["-c", THINKER_TRAIN],
    "python train.py": [ROOT / "train.py"],
}
HINTS = {
    "thinker train": "thinker generate run\n",
    "thinker-train": "thinker generate run\n",
    "python train.py": "generate.py run\n",
}


@pytest.mark.parametrize("form", FORMS)
def test_a_run_directory_stands_for_its_config(form, train_args, tmp_path):
    """`thinker train runs/mine` resumes the run, also from another folder, to the same bits."""
    _, config, *overrides = map(str, train_args)
    assert (
        'thinker-train = "thinker.training.command:command"'
        in (ROOT / "pyproject.toml").read_text()
    )

    def run_form(*arguments):
        command = [sys.executable, *FORMS[form], *arguments]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done

    options = [config, *overrides, "train.decay_fraction=0"]
    first = run_form(*options, "run.dir=run", "train.max_steps=2")
    assert HINTS[form] in first.stdout
    resumed = run_form("run", "train.max_steps=4")
    assert "resuming from step 2 in run" in resumed.stderr
    again = run_form("run")
    assert "run is finished" in again.stderr
    run_form(*options, "run.dir=whole", "train.max_steps=4")
    assert_same_tensors(tmp_path / "run", tmp_path / "whole", 4)


def test_a_chat_needs_a_model_of_chats(tiny_run):
    done = run_thinker("chat", tiny_run)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == (
        f"error: {tiny_run} has no chat template: it was not trained on chats; "
        f"use thinker generate {tiny_run} --interactive"
    )


# Libraries that take long to import, or that an installation may lack.
LIBRARIES = {
    *("torch", "numpy", "scipy", "pandas", "pyarrow", "matplotlib", "networkx", "tqdm", "filelock"),
    *("pydantic", "yaml", "jinja2", "argcomplete", "requests", "httpx", "starlette", "uvicorn"),
    *("safetensors", "gguf", "tokenizers", "tiktoken", "rustbpe", "llguidance", "datasets"),
    *("transformers", "peft", "lm_eval", "wandb", "tensorboard"),
}
MODEL = {"torch", "numpy", "safetensors", "tiktoken", "tqdm"}  # to load a model and its tokenizer
CONFIG = {"pydantic", "yaml", "filelock"}  # to read a config and lock its tokens
SHORT = "data.max_documents=300 model.d_model=48 model.n_layers=1 train.batch_size=4 train.eval_sequences=8"
USED = {
    "configs": set(),
    "lessons": set(),
    "patterns full --length 4": {"torch", "numpy", "tqdm"},
    "plan quickstart model.vocab_size=3072 --no-steps": MODEL | CONFIG,
    f"data quickstart {SHORT}": MODEL | CONFIG | {"rustbpe"},
    f"train quickstart {SHORT} train.max_steps=2 run.dir=RUN": MODEL
    | CONFIG
    | {"rustbpe", "matplotlib"},
    "generate TINY --prompt Line --max-new-tokens 3": MODEL,
    "generate TINY --score TEXT": MODEL,
    "eval TINY": MODEL | CONFIG | {"scipy"},
    "inspect map TINY --prompt Line": MODEL | {"yaml"},
    "inspect heads TINY --prompt Line": MODEL | CONFIG,
    "export gguf TINY OUT.gguf": MODEL | {"gguf", "yaml"},
}


@pytest.mark.more
@pytest.mark.parametrize("line", USED)
def test_a_command_imports_only_what_it_uses(line, tiny_run, tmp_path):
    if line.startswith("export gguf"):
        pytest.importorskip("gguf")
    text = tmp_path / "text.txt"
    text.write_text("Line 1 of the text.\n")
    places = {"TINY": tiny_run, "RUN": tmp_path / "run", "TEXT": text, "OUT": tmp_path / "out"}
    words = line
    for name, path in places.items():
        words = words.replace(name, str(path))
    command = [sys.executable, "-c", IMPORTED, *words.split()]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    imported = set(done.stderr.splitlines()[-1].split())
    assert "thinker" in imported, done.stderr
    assert imported & LIBRARIES <= USED[line]
