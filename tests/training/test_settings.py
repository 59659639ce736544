"""What depends on the machine is chosen once, said, and kept."""

import pytest
import torch

from thinker.model import ThinkerConfig
from thinker.runtime.errors import UserError
from thinker.training import settings
from thinker.training.config import validate_config

CPU = torch.device("cpu")
BEFORE = settings.MachineSettings(precision="bf16", compile=False, micro_batch_size=2)
WIDE = ThinkerConfig(vocab_size=100, d_model=384, n_layers=2, n_heads=4)
NARROW = ThinkerConfig(vocab_size=100, d_model=64, n_layers=2, n_heads=4)


def config(**train):
    return validate_config({"train": {"precision": "fp32", "batch_size": 6, "max_minutes": 1, **train}})


@pytest.mark.parametrize(
    ("model_config", "minutes", "pays"), [(WIDE, 1, False), (WIDE, 30, True), (NARROW, 1, False), (NARROW, 3000, False)]
)
def test_blocks_are_compiled_where_the_run_is_long_enough(model_config, minutes, pays, capsys, monkeypatch):
    monkeypatch.setattr(settings.shutil, "which", lambda name: "/usr/bin/" + name)
    tree = config(max_minutes=minutes)
    settings.resolve_micro_batch(tree, model_config, CPU, None)
    assert tree.train.compile is pays
    said = capsys.readouterr().err
    assert said.startswith("compiling the blocks: it takes about 35 s" if pays else "not compiling the blocks: ")
    assert said.endswith(f"of {60 * minutes}\n" if model_config is WIDE else "at width 64 it saves nothing on a cpu\n")


def test_no_compiler_no_compiling(capsys, monkeypatch):
    monkeypatch.setattr(settings.shutil, "which", lambda name: None)
    tree = config(max_minutes=3000)
    settings.resolve_micro_batch(tree, WIDE, CPU, None)
    assert tree.train.compile is False
    assert "there is no C++ compiler" in capsys.readouterr().err


def test_the_shorter_limit_counts_and_steps_are_guessed_from_their_flops():
    both = config(max_minutes=3, max_steps=10**9)
    assert settings.planned_run_seconds(both, WIDE, CPU) == 180
    few = settings.planned_run_seconds(config(max_minutes=None, max_steps=10), WIDE, CPU)
    assert 0 < few < settings.planned_run_seconds(config(max_minutes=None, max_steps=10_000), WIDE, CPU)


def test_what_was_chosen_before_is_kept_and_what_is_written_is_obeyed(capsys):
    tree = config(compile="auto", micro_batch_size="auto", max_minutes=3000)
    settings.resolve_micro_batch(tree, WIDE, CPU, BEFORE)
    assert (tree.train.compile, tree.train.micro_batch_size) == (False, 2)
    tree = config(compile=True, micro_batch_size=3)
    settings.resolve_micro_batch(tree, NARROW, CPU, BEFORE)
    assert (tree.train.compile, tree.train.micro_batch_size) == (True, 3)
    tree = config(micro_batch_size=None)
    settings.resolve_micro_batch(tree, NARROW, CPU, None)
    assert tree.train.micro_batch_size == 6
    tree = config(precision="auto")
    settings.resolve_precision(tree, CPU, BEFORE)
    assert tree.train.precision == "bf16"


def test_a_micro_batch_that_fits_is_found_and_said(capsys, monkeypatch):
    tree = config(micro_batch_size="auto", compile=False)
    monkeypatch.setattr(settings, "free_memory", lambda device, dist: 2**40)
    settings.resolve_micro_batch(tree, NARROW, CPU, None)
    assert tree.train.micro_batch_size == 6
    assert capsys.readouterr().err == "6 sequences at once fit into 1099.5 GB\n"
    monkeypatch.setattr(settings, "free_memory", lambda device, dist: 2**20)
    with pytest.raises(UserError, match="one sequence of 256 tokens takes"):
        settings.resolve_micro_batch(config(micro_batch_size="auto"), NARROW, CPU, None)


def test_activations_can_leave_a_gpu_only():
    with pytest.raises(UserError, match="off a CUDA GPU"):
        settings.resolve_micro_batch(config(offload_activations=True), NARROW, CPU, None)


def test_a_machine_that_cannot_go_on_as_it_was_begun_is_told_why(monkeypatch):
    monkeypatch.setattr(settings.shutil, "which", lambda name: None)
    compiled = settings.MachineSettings(precision="fp32", compile=True, micro_batch_size=2)
    with pytest.raises(UserError, match="begun with compiled blocks, and there is no C.. compiler here"):
        settings.resolve_micro_batch(config(compile="auto"), NARROW, CPU, compiled)
    half = settings.MachineSettings(precision="fp16", compile=False, micro_batch_size=2)
    with pytest.raises(UserError, match="begun in fp16: precision fp16 trains on a GPU only"):
        settings.resolve_precision(config(precision="auto"), CPU, half)


def test_deterministic_training_measures_nothing(monkeypatch):
    monkeypatch.setattr(settings, "compiling_pays_off", None)
    monkeypatch.setattr(settings, "choose_precision", lambda name, device: {"fp32": "fp32"}[name])
    tree = config(deterministic=True, precision="auto", compile="auto", max_minutes=None, max_steps=5)
    settings.resolve_precision(tree, CPU, None)
    settings.resolve_micro_batch(tree, WIDE, CPU, None)
    assert (tree.train.precision, tree.train.compile) == ("fp32", False)
    for change in ({"max_minutes": 1}, {"micro_batch_size": "auto"}):
        with pytest.raises(UserError, match="train.deterministic needs"):
            config(**{"deterministic": True, "max_minutes": None, "max_steps": 5, **change})
