"""Sampling: text in, text out."""

from generation.engine import Completion, Generator
from generation.sampler import SamplingParams

__all__ = ["Completion", "Generator", "SamplingParams"]
