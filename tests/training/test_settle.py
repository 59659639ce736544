"""What depends on the machine is chosen once, said, and kept."""

import pytest
import torch

from errors import UserError
from model import ThinkerConfig
from training import settle
from training.recipe import check_recipe

CPU = torch.device("cpu")
WIDE = ThinkerConfig(vocab_size=100, d_model=384, n_layers=2, n_heads=4)
NARROW = ThinkerConfig(vocab_size=100, d_model=64, n_layers=2, n_heads=4)


def recipe(**train):
    return check_recipe({"train": {"precision": "fp32", "batch_size": 6, "max_minutes": 1, **train}})


@pytest.mark.parametrize(
    ("config", "minutes", "pays"), [(WIDE, 1, False), (WIDE, 30, True), (NARROW, 1, False), (NARROW, 3000, False)]
)
def test_blocks_are_compiled_where_the_run_is_long_enough(config, minutes, pays, capsys, monkeypatch):
    monkeypatch.setattr(settle.shutil, "which", lambda name: "/usr/bin/" + name)
    tree = recipe(max_minutes=minutes)
    settle.settle_size(tree, config, CPU, None)
    assert tree.train.compile is pays
    said = capsys.readouterr().err
    assert said.startswith("compiling the blocks: it takes about 35 s" if pays else "not compiling the blocks: ")
    assert said.endswith(f"of {60 * minutes}\n" if config is WIDE else "at width 64 it saves nothing on a cpu\n")


def test_no_compiler_no_compiling(capsys, monkeypatch):
    monkeypatch.setattr(settle.shutil, "which", lambda name: None)
    tree = recipe(max_minutes=3000)
    settle.settle_size(tree, WIDE, CPU, None)
    assert tree.train.compile is False
    assert "there is no C++ compiler" in capsys.readouterr().err


def test_the_shorter_limit_counts_and_steps_are_guessed_from_their_flops():
    both = recipe(max_minutes=3, max_steps=10**9)
    assert settle.planned_seconds(both, WIDE, CPU) == 180
    few = settle.planned_seconds(recipe(max_minutes=None, max_steps=10), WIDE, CPU)
    assert 0 < few < settle.planned_seconds(recipe(max_minutes=None, max_steps=10_000), WIDE, CPU)


def test_what_was_chosen_before_is_kept_and_what_is_written_is_obeyed(capsys):
    tree = recipe(compile="auto", micro_batch_size="auto", max_minutes=3000)
    settle.settle_size(tree, WIDE, CPU, {"train": {"compile": False, "micro_batch_size": 2}})
    assert (tree.train.compile, tree.train.micro_batch_size) == (False, 2)
    tree = recipe(compile=True, micro_batch_size=3)
    settle.settle_size(tree, NARROW, CPU, {"train": {"compile": False, "micro_batch_size": 2}})
    assert (tree.train.compile, tree.train.micro_batch_size) == (True, 3)
    tree = recipe(micro_batch_size=None)
    settle.settle_size(tree, NARROW, CPU, None)
    assert tree.train.micro_batch_size == 6
    tree = recipe(precision="auto")
    settle.settle_precision(tree, CPU, {"train": {"precision": "bf16"}})
    assert tree.train.precision == "bf16"


def test_a_micro_batch_that_fits_is_found_and_said(capsys, monkeypatch):
    tree = recipe(micro_batch_size="auto", compile=False)
    monkeypatch.setattr(settle, "free_memory", lambda device: 2**40)
    settle.settle_size(tree, NARROW, CPU, None)
    assert tree.train.micro_batch_size == 6
    assert capsys.readouterr().err == "6 sequences at once fit into 1099.5 GB\n"
    monkeypatch.setattr(settle, "free_memory", lambda device: 2**20)
    with pytest.raises(UserError, match="one sequence of 256 tokens takes"):
        settle.settle_size(recipe(micro_batch_size="auto"), NARROW, CPU, None)


def test_activations_can_leave_a_gpu_only():
    with pytest.raises(UserError, match="off a CUDA GPU"):
        settle.settle_size(recipe(offload_activations=True), NARROW, CPU, None)
