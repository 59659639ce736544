"""Samples of the model during training (train.sample_every)."""

import sys

from tqdm import tqdm

from thinker.data.tokenizers.tokenizer import Tokenizer
from thinker.runtime.errors import RunError
from thinker.training.callback import Callback, StepInfo, TrainingParts, TrainingRun

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
        if not config.prefix <= len(tokens) <= config.max_cached_len:
            from thinker.generation.sequence import check_prompt  # to say what is wrong

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
        from thinker.generation import Generator, SamplingParams  # for the first sample

        parts = self.run.parts
        with self.run.evaluated_weights():
            model = parts.model
            if hasattr(model, "unshard"):  # FSDP2
                from thinker.training.distributed.parallel_model import unwrapped_copy

                model = unwrapped_copy(model)
            if not parts.dist.is_main:
                return ""
            generator = Generator(model, self.tokenizer)  # which copies the weights
        params = SamplingParams(max_new_tokens=MAX_TOKENS, temperature=TEMPERATURE, seed=seed)
        try:
            completion = generator.generate([self.prompt], params)
        except RunError as error:  # non-finite logits; training goes on and checks the next loss
            return str(error)
        return " ".join((self.prompt + completion[0].text).split())
