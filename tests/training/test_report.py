"""What a run prints and plots at its end."""

import contextlib
import io
import json
import shlex
import sys
import warnings

import pytest
import torch
from conftest import random_model

from thinker.checkpoint.run_directory import RunDirectory
from thinker.training.config import validate_config
from thinker.training.report import print_summary
from thinker.training.resolve_settings import resolve_settings
from thinker.training.resume import RunState

LINES = [
    {"step": 1, "train_loss": 5.5},
    {"step": 2, "val_loss": 5.0, "val_bits_per_byte": 7.0},
    {"step": 3, "val_loss": 4.0, "val_bits_per_byte": 6.0},
]


@pytest.fixture
def settings():
    train = {"precision": "fp32", "compile": False, "micro_batch_size": 1, "max_steps": 4}
    config = validate_config({"train": train, "run": {"dir": "x"}})
    return resolve_settings(config, random_model().config, torch.device("cpu"))


@pytest.mark.parametrize("name", [r"$\frac{$", "$x$", "a b", "名前", "caf\udce9", "it's $5"])
def test_any_name_of_a_run_is_plotted_and_quoted(tmp_path, settings, monkeypatch, name):
    path = tmp_path / name
    path.mkdir()
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    monkeypatch.setattr(sys, "argv", ["/my checkout/train.py"])
    monkeypatch.setattr(sys, "executable", "/my env/bin/python")
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()) as printed:
        warnings.simplefilter("error")
        print_summary(RunDirectory(path), RunState(step=3, tokens=7, settings=settings), epochs=1.0)
    assert (path / "loss.png").read_bytes().startswith(b"\x89PNG")
    command = printed.getvalue().split("sample from it: ")[1]
    assert shlex.split(command) == ["/my env/bin/python", "/my checkout/generate.py", str(path)]


BAD = ["NaN", "Infinity", "-Infinity", "1e999", "1" + "0" * 400, '"text"', "null"]


@pytest.mark.parametrize("value", BAD, ids=[text[:9] for text in BAD])
def test_a_line_whose_numbers_are_not_finite_does_not_count(tmp_path, settings, capsys, value):
    text = "".join(json.dumps(line) + "\n" for line in LINES)
    text += f'{{"step": 4, "train_loss": {value}}}\n{{"step": 4, "val_loss": {value}, "val_bits_per_byte": 1.0}}\n'
    (tmp_path / "metrics.jsonl").write_text(text + '{"step": 5, "val_loss": 3.0}\n')
    print_summary(RunDirectory(tmp_path), RunState(step=4, settings=settings), epochs=1.0)
    assert "validation loss 4.0000 nats per token, 6.0000 bits per byte" in capsys.readouterr().out
    assert (tmp_path / "loss.png").exists()
