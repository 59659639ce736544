"""Whole trainings in processes of their own: a target for fork_server.run_ranks()."""

from pathlib import Path

from thinker.benchmarks.systems import accumulation
from thinker.training import trainer
from thinker.training.config.load import load_config
from thinker.training.run import build_trainer


def train_each(dist, config, runs):
    """Train by a config with each of some lists of overrides, one after the other; their exit
    statuses."""
    trainer.print_summary = lambda *arguments: None  # without the picture of the losses
    return [build_trainer(load_config(Path(config), overrides), dist).train() for overrides in runs]


def compare_with_plain(dist, folder, parallel, sizes, updates=False):
    """What benchmarks/systems/accumulation.py measures on this rank, of gradients or of updates."""
    dist.init_process_group("cpu", 600.0)
    measure = accumulation.measure_updates if updates else accumulation.measure_gradients
    return measure(dist, folder, parallel, sizes)
