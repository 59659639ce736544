"""What a run prints and plots at its end."""

import contextlib
import io
import json
import random
import shlex
import sys
import warnings
from pathlib import Path

import pytest
import torch
from conftest import random_model

from thinker.checkpoint.run_directory import RunDirectory
from thinker.data.corpus.corpus import prepare_corpus
from thinker.evaluation.text_baselines import text_baselines
from thinker.runtime.process import invocation
from thinker.training.config.load import validate_config
from thinker.training.reports.after_training import sampling_hint
from thinker.training.reports.summary import print_summary
from thinker.training.settings.resolve import resolve_settings
from thinker.training.state.run_state import RunState

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


@pytest.fixture
def corpus(tmp_path_factory):
    return prepare(tmp_path_factory.mktemp("corpus"), "some words\n" * 20)


def prepare(folder, text):
    (folder / "text.txt").write_text(text)
    given = {
        "source": "text",
        "path": str(folder / "text.txt"),
        "cache_dir": folder,
        "val_fraction": 0.2,
    }
    return prepare_corpus(tokenizer="byte", progress=False, **given)


def random_text(n_bytes, letters="abcdefgh"):
    return "".join(random.Random(0).choices(letters, k=n_bytes))


@pytest.mark.parametrize("name", [r"$\frac{$", "$x$", "a b", "名前", "caf\udce9", "it's $5"])
def test_any_name_of_a_run_is_plotted_and_quoted(tmp_path, settings, corpus, monkeypatch, name):
    path = tmp_path / name
    path.mkdir()
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    monkeypatch.setattr(invocation, "ROOT", Path("/my checkout"))
    monkeypatch.setattr(sys, "argv", ["/my checkout/train.py"])
    monkeypatch.setattr(sys, "executable", "/my env/bin/python")
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()) as printed:
        warnings.simplefilter("error")
        print_summary(
            RunDirectory(path), RunState(step=3, tokens=7, settings=settings), 1.0, corpus
        )
    assert (path / "loss.png").read_bytes().startswith(b"\x89PNG")
    command = printed.getvalue().split("sample from it: ")[1]
    assert shlex.split(command) == ["/my env/bin/python", "/my checkout/generate.py", str(path)]


BAD = ["NaN", "Infinity", "-Infinity", "1e999", "1" + "0" * 400, '"text"', "null"]


@pytest.mark.parametrize("value", BAD, ids=[text[:9] for text in BAD])
def test_a_line_whose_numbers_are_not_finite_does_not_count(
    tmp_path, settings, corpus, capsys, value
):
    text = "".join(json.dumps(line) + "\n" for line in LINES)
    text += f'{{"step": 4, "train_loss": {value}}}\n{{"step": 4, "val_loss": {value}, "val_bits_per_byte": 1.0}}\n'
    (tmp_path / "metrics.jsonl").write_text(text + '{"step": 5, "val_loss": 3.0}\n')
    print_summary(
        RunDirectory(tmp_path), RunState(step=4, tokens=9, settings=settings), 1.0, corpus
    )
    assert "validation loss 4.0000 nats per token, 6.0000 bits per byte" in capsys.readouterr().out
    assert (tmp_path / "loss.png").exists()


def summary_of(folder, settings, corpus, capsys, bits=6.0, floor=None, **changes):
    """The lines printed for a run whose losses are 4.0 and 4.1 nats per token."""
    val = {"step": 3, "val_loss": 4.1, "val_bits_per_byte": bits} | (
        {"entropy_floor": floor} if floor else {}
    )
    lines = [
        {"step": 1, "train_loss": 4.0},
        {"step": 2, "val_loss": 5.0, "val_bits_per_byte": 7.0},
        val,
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    print_summary(
        RunDirectory(folder),
        RunState(step=3, tokens=700, settings=settings, **changes),
        0.4,
        corpus,
    )
    return capsys.readouterr().out.splitlines()


def test_the_summary_says_where_a_run_stands(tmp_path, settings, corpus, capsys):
    printed = summary_of(tmp_path, settings, corpus, capsys)
    assert (
        printed[2]
        == "training loss 4.0000, 0.1000 below the validation loss, after 0.4 epochs: underfitted"
    )
    assert printed[3].startswith("estimate: twice the steps would lower the loss by about ")
    assert printed[4].startswith("loss curve")  # the text is too short for a comparison
    assert not any(line.startswith("advice") for line in printed)


def test_a_model_is_compared_with_simple_ones_and_told_to_train_longer_if_it_is_worse(
    tmp_path, settings, capsys
):  # fmt: skip
    corpus = prepare(tmp_path, random_text(20_000))
    baselines = text_baselines(corpus)
    for bits, is_worse in ((baselines["5-gram"] - 0.01, False), (baselines["5-gram"] + 0.01, True)):
        printed = summary_of(tmp_path, settings, corpus, capsys, bits)
        others = ", ".join(f"{name} {value:.2f}" for name, value in baselines.items())
        assert (
            printed[3]
            == f"bits per byte: this model {bits:.2f}; on up to 100 KB of validation text: {others}"
        )
        advice = [line for line in printed if line.startswith("advice")]
        said = "advice: a 5-gram model predicts the text better than this model; train longer: raise train.max_steps"
        assert advice == ([said] if is_worse else [])


def test_a_run_on_chats_names_the_command_that_chats(settings, monkeypatch):
    state = RunState(step=3, tokens=7, settings=settings)
    monkeypatch.setattr(sys, "argv", ["thinker train"])
    said = sampling_hint(Path("runs/my chat"), state, is_chat=True)
    assert said == "chat with it: thinker chat 'runs/my chat'"
    said = sampling_hint(Path("runs/mine"), state, is_chat=False)
    assert said == "sample from it: thinker generate runs/mine"


def test_a_run_with_a_known_floor_has_no_estimate(tmp_path, settings, corpus, capsys):
    printed = summary_of(tmp_path, settings, corpus, capsys, floor=3.0)
    assert not any("twice" in line for line in printed)
    assert any(line.endswith(": underfitted") for line in printed)
    assert summary_of(tmp_path, settings, corpus, capsys, floor=4.0)[3].endswith(
        ": well fitted"
    )  # 2.5% above
