"""Sampling: text in, text out."""

from generation.engine import Generator, Score
from generation.row import Completion
from generation.sampler import SamplingParams

__all__ = ["Completion", "Generator", "SamplingParams", "Score"]
