"""A config is resolved once for a machine, printed, and kept when the run is resumed."""

import dataclasses

import pytest
import torch
from pydantic import ValidationError

from thinker.model import Thinker, ThinkerConfig
from thinker.runtime.errors import UserError
from thinker.runtime.ranks import DistContext
from thinker.training.config.load import validate_config
from thinker.training.settings import compile_choice, memory_choices
from thinker.training.settings import resolve as resolve_settings

CPU = torch.device("cpu")
WIDE = ThinkerConfig(vocab_size=100, d_model=384, n_layers=2, n_heads=4)
NARROW = ThinkerConfig(vocab_size=100, d_model=64, n_layers=2, n_heads=4)


def config(**train):
    return validate_config(
        {"train": {"precision": "fp32", "batch_size": 6, "max_minutes": 1, **train}}
    )


PREVIOUS = resolve_settings.resolve_settings(
    config(precision="bf16", compile=False, micro_batch_size=2), WIDE, CPU
)


def resolved(model_config=WIDE, previous=None, **train):
    """The settings' section train."""
    return resolve_settings.resolve_settings(
        config(**train), model_config, CPU, previous=previous
    ).train


@pytest.mark.parametrize(
    ("model_config", "minutes", "pays_off"),
    [(WIDE, 1, False), (WIDE, 30, True), (NARROW, 1, False), (NARROW, 3000, False)],
)
def test_blocks_are_compiled_where_the_run_is_long_enough(
    model_config, minutes, pays_off, capsys, monkeypatch
):
    monkeypatch.setattr(compile_choice.shutil, "which", lambda name: "/usr/bin/" + name)
    assert resolved(model_config, max_minutes=minutes).compile is pays_off
    said = capsys.readouterr().err
    assert said.startswith(
        "compiling the blocks: it takes about 35 s" if pays_off else "not compiling the blocks: "
    )
    assert said.endswith(
        f"of {60 * minutes} s\n"
        if model_config is WIDE
        else "it does not save time on cpu at model.d_model=64\n"
    )


@pytest.mark.parametrize(("saved", "given", "expected"), [
    (None, None, 0),  # a run from before Muon's momentum rose: it stays constant
    (None, 7, 7),
    (0, None, 0),
    (500, None, 500),
])  # fmt: skip
def test_a_resumed_run_keeps_how_its_momentum_rises(saved, given, expected):
    optimizer = PREVIOUS.optimizer.model_copy(update={"momentum_warmup_steps": saved})
    previous = PREVIOUS.model_copy(update={"optimizer": optimizer})
    train = {"batch_size": 6, "max_steps": 9}

    def resumed(**optimizer):
        if given is not None:
            optimizer["momentum_warmup_steps"] = given
        asked = validate_config({"train": train, "optimizer": optimizer})
        found = resolve_settings.resolve_settings(asked, WIDE, CPU, previous=previous).optimizer
        return found.momentum, found.momentum_warmup_steps

    assert resumed() == (0.95, expected)
    assert resumed(momentum=0.9) == (0.9, given or 0)  # one that is given is constant


def test_no_compiler_no_compiling(capsys, monkeypatch):
    monkeypatch.setattr(compile_choice.shutil, "which", lambda name: None)
    assert resolved(max_minutes=3000).compile is False
    assert "no C++ compiler found" in capsys.readouterr().err


def test_the_shorter_limit_counts_and_steps_are_estimated_from_their_flops():
    def seconds(**train):
        settings = resolve_settings.resolve_settings(config(compile=False, **train), WIDE, CPU)
        return compile_choice.planned_run_seconds(settings, CPU)

    assert seconds(max_minutes=3, max_steps=10**9) == 180
    assert 0 < seconds(max_minutes=None, max_steps=10) < seconds(max_minutes=None, max_steps=10_000)


def test_earlier_choices_are_kept_and_explicit_values_are_obeyed():
    train = resolved(previous=PREVIOUS, compile="auto", micro_batch_size="auto", max_minutes=3000)
    assert (train.compile, train.micro_batch_size) == (False, 2)
    train = resolved(NARROW, previous=PREVIOUS, compile=True, micro_batch_size=3)
    assert (train.compile, train.micro_batch_size) == (True, 3)
    assert resolved(NARROW, micro_batch_size=None).micro_batch_size == 6
    assert resolved(previous=PREVIOUS, precision="auto").precision == "bf16"


def test_a_config_is_not_changed_by_resolving_it():
    written = config(micro_batch_size=None, compile=False)
    before = written.model_dump()
    settings = resolve_settings.resolve_settings(written, WIDE, CPU)
    assert written.model_dump() == before
    with pytest.raises(ValidationError, match="frozen"):
        written.train.batch_size = 3
    with pytest.raises(ValidationError, match="frozen"):
        settings.train.micro_batch_size = 3
    again = validate_config(settings.model_dump(mode="json"))  # config.yaml of the run directory
    assert resolve_settings.resolve_settings(again, again.thinker_config(100), CPU) == settings


def test_a_micro_batch_that_fits_is_found_and_printed(capsys, monkeypatch):
    one_layer = dataclasses.replace(NARROW, n_layers=1)
    monkeypatch.setattr(memory_choices, "free_memory", lambda device, dist: 2**40)
    assert resolved(one_layer, micro_batch_size="auto", compile=False).micro_batch_size == 6
    assert (
        capsys.readouterr().err
        == "train.micro_batch_size=auto: 6 sequences fit in 1.1 TB of free memory\n"
    )
    monkeypatch.setattr(memory_choices, "free_memory", lambda device, dist: 2**20)
    with pytest.raises(UserError, match="one sequence of 256 tokens needs"):
        resolved(one_layer, micro_batch_size="auto", batch_size=1)
    with pytest.raises(UserError, match="does not divide .* .6 sequences.; use 1, 2, 3, 6"):
        resolved(NARROW, micro_batch_size=4)


def test_checkpoints_are_written_in_the_background_on_a_gpu_with_memory_to_copy_to(monkeypatch):
    """Five copies of the weights: of the best checkpoint, of the newest with two moments and an
    average."""
    n_bytes = 4 * sum(parameter.numel() for parameter in Thinker(NARROW).parameters())

    def chosen(device, ranks=1, previous=None, free=2**40, **train):
        monkeypatch.setattr(resolve_settings, "free_memory", lambda device: free)
        dist = DistContext(world_size=ranks)
        section = config(**train).train
        device = torch.device(device)
        return resolve_settings._saves_in_background(section, NARROW, device, previous, dist)

    assert chosen("cuda")
    assert chosen("cuda", free=5 * n_bytes + 1)
    assert not chosen("cuda", free=5 * n_bytes)
    assert not chosen("cuda", ranks=2)
    assert not chosen("cpu")
    assert chosen("cpu", async_save=True)
    assert not chosen("cuda", async_save=False)
    assert not chosen("cuda", previous=PREVIOUS)
    assert resolved(NARROW, compile=False).async_save is False


def test_activations_are_offloaded_from_a_gpu_only():
    with pytest.raises(UserError, match="needs a CUDA GPU"):
        resolved(NARROW, offload_activations=True)


def test_a_machine_that_cannot_resume_a_run_says_why(monkeypatch):
    monkeypatch.setattr(compile_choice.shutil, "which", lambda name: None)
    with pytest.raises(
        UserError,
        match="uses compiled blocks, but this machine cannot compile .no C.. compiler found",
    ):
        resolved(NARROW, previous=PREVIOUS.with_train(compile=True), compile="auto")
    with pytest.raises(
        UserError, match="train.precision=fp16, but precision fp16 cannot train on a CPU"
    ):
        resolved(NARROW, previous=PREVIOUS.with_train(precision="fp16"), precision="auto")


def test_deterministic_training_measures_nothing(monkeypatch):
    monkeypatch.setattr(compile_choice, "compiling_pays_off", None)
    monkeypatch.setattr(
        resolve_settings, "choose_precision", lambda name, device: {"fp32": "fp32"}[name]
    )
    train = resolved(
        deterministic=True, precision="auto", compile="auto", max_minutes=None, max_steps=5
    )
    assert (train.precision, train.compile) == ("fp32", False)
    for change in ({"max_minutes": 1}, {"micro_batch_size": "auto"}):
        with pytest.raises(UserError, match="train.deterministic cannot be combined with"):
            config(**{"deterministic": True, "max_minutes": None, "max_steps": 5, **change})
