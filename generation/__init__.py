"""Text generation."""

from thinker.generation.engine import Generator
from thinker.generation.sampler import SamplingParams
from thinker.generation.sequence import Completion, Score

__all__ = ["Completion", "Generator", "SamplingParams", "Score"]
