"""Samples of the model during training (train.sample_every)."""

import sys
from typing import TYPE_CHECKING

from tqdm import tqdm

from thinker.data.tokenizers.tokenizer import Tokenizer
from thinker.runtime.errors import RunError
from thinker.training.callback import Callback, StepInfo, TrainingParts, TrainingRun

if TYPE_CHECKING:
    from thinker.generation import Generator

MAX_TOKENS = 48
TEMPERATURE = 0.8


class Samples(Callback):
    """Takes a sample every few steps: prints it as one line, and writes it to samples.jsonl."""

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
        """Take a sample if it is time to."""
        if info.step % self.every:
            return
        run = self.run
        run.show_status(f"step {info.step}, sampling")
        text = self.sample(info.step)
        if text is None:
            return
        if run.directory.writes:
            line = " ".join((self.prompt + text).split())
            tqdm.write(f"step {info.step}: {line}", file=sys.stderr)
            run.directory.log_sample(info.step, self.prompt, text)
        for callback in run.parts.callbacks:
            callback.on_sample(info.step, self.prompt, text)

    def sample(self, step: int) -> str | None:
        """What the current model writes after the prompt, drawn on rank 0; None if its logits are
        not finite. All ranks must call this."""
        generator = self._generator()
        text = None
        if generator is not None:
            from thinker.generation import SamplingParams

            params = SamplingParams(max_new_tokens=MAX_TOKENS, temperature=TEMPERATURE, seed=step)
            try:
                text = generator.generate([self.prompt], params)[0].text
            except RunError as error:  # training goes on and checks the next loss
                tqdm.write(f"step {step}: {error}", file=sys.stderr)
        return self.run.parts.dist.broadcast_object(text)

    def _generator(self) -> "Generator | None":
        """A generator with a copy of the weights that are evaluated; None except on rank 0."""
        from thinker.generation import Generator  # for the first sample

        parts = self.run.parts
        with self.run.evaluated_weights():
            model = parts.model
            if hasattr(model, "unshard"):  # FSDP2
                from thinker.training.distributed.parallel_model import unwrapped_copy

                model = unwrapped_copy(model)
            if not parts.dist.is_main:
                return None
            return Generator(model, self.tokenizer)
