"""Weights and logits that are not finite: every command ends in one line with status 1, and nothing
is written."""

import importlib.util
import io
import math
import sys

import pytest
import torch
from conftest import ROOT
from installed import if_installed

from thinker import checkpoint, interop
from thinker.generation import Generator, SamplingParams
from thinker.runtime.checks import check_computed, check_weights, finite_json
from thinker.runtime.errors import RunError

COMMANDS = {  # OUT is a file that must not exist afterwards
    "generate.py": ["RUN", "--prompt", "Line"],
    "generate.py --json": ["RUN", "--prompt", "Line", "--json"],
    "generate.py --interactive": ["RUN", "--prompt", "Line", "--interactive"],
    "generate.py --score": ["RUN", "--score", "TEXT"],
    "generate.py --score --json": ["RUN", "--score", "TEXT", "--json"],
    "scripts/eval.py": ["RUN", "--source", "text", "--path", "TEXT"],
    "scripts/eval.py --json": ["RUN", "--source", "text", "--path", "TEXT", "--json"],
    "scripts/eval.py --long": [
        "RUN",
        "--long",
        "--windows",
        "4",
        "--source",
        "text",
        "--path",
        "TEXT",
    ],
    "scripts/inspect_model.py lens": ["lens", "RUN", "--prompt", "Line", "--html", "OUT"],
    "scripts/inspect_model.py map": ["map", "RUN", "--prompt", "Line", "--html", "OUT"],
    "scripts/export_gguf.py": ["RUN", "OUT"],
    "scripts/export_hf.py": ["RUN", "OUT"],
}
NEED_NO_LOGITS = ("scripts/inspect_model.py map", "scripts/export_gguf.py")


def broken_run(tiny_run, folder, change):
    """A checkpoint with its tokenizer, in whose weights `change` breaks something."""
    model, tokenizer = interop.load(tiny_run)
    with torch.no_grad():
        change(model)
    checkpoint.save(folder, model, {"step": 0})
    tokenizer.save(folder)
    return folder


@pytest.fixture(scope="module")
def nan_run(tiny_run, tmp_path_factory):
    def change(model):
        model.blocks[0].mlp.up_proj.weight[3, 4] = math.nan

    return broken_run(tiny_run, tmp_path_factory.mktemp("nan") / "run", change)


@pytest.fixture(scope="module")
def overflowing_run(tiny_run, tmp_path_factory):
    """Finite weights whose logits are not."""

    def change(model):
        model.norm.weight.fill_(1e30)
        model.lm_head.weight.mul_(1e30)

    return broken_run(tiny_run, tmp_path_factory.mktemp("large") / "run", change)


@pytest.fixture
def command(monkeypatch, text_file, tmp_path, capfd):
    """Runs a script's main() in this process; it must raise RunError, print no number, and leave no
    file."""

    def run(name, folder, arguments):
        path = ROOT / name.split()[0]
        spec = importlib.util.spec_from_file_location(path.stem, path)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)  # dataclasses look it up
        spec.loader.exec_module(module)
        (tmp_path / "text").write_text(text_file.read_text()[:300])
        places = {
            "RUN": str(folder),
            "TEXT": str(tmp_path / "text"),
            "OUT": str(tmp_path / "out" / "file"),
        }
        (tmp_path / "out").mkdir()
        monkeypatch.setattr("sys.argv", [name, *(places.get(word, word) for word in arguments)])
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO()))
        with pytest.raises(RunError) as caught:
            module.main()
        assert list((tmp_path / "out").iterdir()) == []
        printed = capfd.readouterr().out
        assert "nan" not in printed.lower()
        assert "\0" not in printed
        return str(caught.value)

    return run


@pytest.mark.parametrize("name", COMMANDS)
def test_weights_that_are_not_finite_are_refused_by_name(command, nan_run, name):
    message = command(name, nan_run, COMMANDS[name])
    assert "run: blocks.0.mlp.up_proj.weight has non-finite weights" in message


@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in NEED_NO_LOGITS])
def test_logits_that_are_not_finite_are_an_error_too(command, overflowing_run, name):
    if name == "scripts/export_hf.py":
        pytest.importorskip("transformers")
    message = command(name, overflowing_run, COMMANDS[name])
    assert (
        "logits from transformers differ" if name == "scripts/export_hf.py" else "non-finite"
    ) in message


def test_it_is_one_line_and_status_1(run_script, nan_run):
    done = run_script(ROOT / "generate.py", nan_run, "--prompt", "Line")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert done.stderr.startswith("error: ")


def test_gguf_in_f16_refuses_what_f16_cannot_hold(command, tiny_run, tmp_path):
    pytest.importorskip("gguf")

    def change(model):
        model.blocks[0].mlp.down_proj.weight[0, 0] = 1e6

    run = broken_run(tiny_run, tmp_path / "run", change)
    message = command("scripts/export_gguf.py", run, ["RUN", "OUT"])
    assert "blocks.0.mlp.down_proj.weight as f16 has non-finite weights" in message


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_cache": False},
        *if_installed("speculation", {"speculate": 2}),
        {"window": 8},
        {"bits": 8},
    ],
)
def test_a_generator_ends_where_logits_are_not_finite(overflowing_run, options):
    generator = Generator(*interop.load(overflowing_run), **options)
    for params in (SamplingParams(temperature=0), SamplingParams(top_p=0.9, seed=1)):
        with pytest.raises(RunError, match="non-finite"):
            generator.generate("Line", params)
    with pytest.raises(RunError, match="non-finite"):
        generator.score("Line 1")


def test_what_is_finite_passes():
    largest = torch.finfo(torch.float32).max
    check_weights(
        [
            ("large", torch.full((9,), largest)),
            ("ids", torch.tensor([1])),
            ("half", torch.ones(3).half()),
        ],
        "x",
    )
    check_computed([0.0, -1e300])
    assert finite_json({"ü": 1.5}) == '{"\\u00fc": 1.5}'
    for wrong in (math.nan, math.inf, -math.inf):
        with pytest.raises(RunError, match="x: w has non-finite weights"):
            check_weights([("w", torch.tensor([1.0, wrong, -wrong]))], "x")
        with pytest.raises(RunError, match="non-finite"):
            finite_json([{"a": wrong}])
