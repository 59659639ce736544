"""Whole trainings in processes of their own: a target for fork_server.run_ranks()."""

from pathlib import Path

from thinker.training import trainer
from thinker.training.config.load import load_config
from thinker.training.run import build_trainer


def train_each(dist, config, runs):
    """Train by a config with each of some lists of overrides, one after the other; their exit
    statuses."""
    trainer.print_summary = lambda *arguments: None  # without the picture of the losses
    return [build_trainer(load_config(Path(config), overrides), dist).train() for overrides in runs]
