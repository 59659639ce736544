"""Samples of the model during training (train.sample_every)."""

import sys

from tqdm import tqdm

from thinker.data.tokenizers.tokenizer import Tokenizer
from thinker.generation import Generator, SamplingParams
from thinker.generation.sequence import check_prompt
from thinker.runtime.errors import RunError
from thinker.training.callback import Callback, StepInfo, TrainingParts, TrainingRun
from thinker.training.nonfinite import unwrapped_copy

MAX_TOKENS = 48
TEMPERATURE = 0.8


class Samples(Callback):
    """Prints a sample every few steps, as one line."""

    def __init__(self, every: int, prompt: str, tokenizer: Tokenizer) -> None:
        self.every = every
        self.prompt = prompt
        self.tokenizer = tokenizer

    def setup(self, parts: TrainingParts) -> None:
        """Raise UserError if the prompt is too long for the model."""
        config = parts.model.config
        tokens = [0, *self.tokenizer.encode(self.prompt)]
        check_prompt(tokens, self.tokenizer, config, config.max_cached_len)

    def on_start(self, run: TrainingRun) -> None:
        """Keep the run."""
        self.run = run

    def on_step_end(self, info: StepInfo) -> None:
        """Print a sample if it is time to."""
        if info.step % self.every == 0:
            self.run.show_status(f"step {info.step}, sampling")
            tqdm.write(f"step {info.step}: {self.sample(info.step)}", file=sys.stderr)

    def sample(self, seed: int) -> str:
        """A sample from the current model; empty except on rank 0. All ranks must call this."""
        parts = self.run.parts
        with self.run.evaluated_weights():
            is_sharded = hasattr(parts.model, "unshard")
            model = unwrapped_copy(parts.model) if is_sharded else parts.model
            if not parts.dist.is_main:
                return ""
            generator = Generator(model, self.tokenizer)  # which copies the weights
        params = SamplingParams(max_new_tokens=MAX_TOKENS, temperature=TEMPERATURE, seed=seed)
        try:
            completion = generator.generate([self.prompt], params)
        except RunError as error:  # non-finite logits; training goes on and checks the next loss
            return str(error)
        return " ".join((self.prompt + completion[0].text).split())
