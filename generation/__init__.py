"""Sampling: text in, text out."""

from thinker.generation.engine import Generator, Score
from thinker.generation.sampler import SamplingParams
from thinker.generation.sequence import Completion

__all__ = ["Completion", "Generator", "SamplingParams", "Score"]
