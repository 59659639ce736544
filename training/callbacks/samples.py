"""Samples of the model during training (train.sample_every)."""

import math
import sys
from typing import TYPE_CHECKING, NamedTuple

from thinker.data.corpus.corpus import Corpus
from thinker.data.corpus.shards import TokenShards
from thinker.data.text.document import Message
from thinker.data.tokenizers.tokenizer import Tokenizer
from thinker.runtime.errors import RunError, UserError
from thinker.runtime.process.progress import Progress
from thinker.runtime.registry import offers
from thinker.training.callback import Callback, StepInfo, TrainingParts, TrainingRun
from thinker.training.settings.settings import Settings

if TYPE_CHECKING:
    from thinker.generation import Generator

MAX_TOKENS = 48
TEMPERATURE = 0.8
# Of train.sample_every=auto: samples of a run, and steps between two of them at least.
N_SAMPLES = 8
MIN_STEPS = 5


def count_samples(max_steps: int | None) -> int:
    """How many samples train.sample_every=auto takes: fewer in a run of less than 40 steps."""
    if max_steps is None:
        return N_SAMPLES
    return max(1, min(N_SAMPLES, max_steps // MIN_STEPS))


def reaches_share(before: float, now: float, n_shares: int) -> bool:
    """Whether a step ends one of `n_shares` equal shares of the run.

    before, now: the share of the run that was done before the step and is done after it.
    """
    return math.floor(n_shares * now) > math.floor(n_shares * before)


class SamplePrompt(NamedTuple):
    """What samples go on from. In conversations they are answers, and the tokens are those of all
    that is before one."""

    text: str
    tokens: list[int]  # with BOS


def find_prompt(settings: Settings, corpus: Corpus) -> SamplePrompt:
    """The prompt of the samples of a run. In conversations, that of the config is the message of a
    user; without one, samples answer the first question of the validation split."""
    text = settings.train.sample_prompt
    tokenizer = corpus.tokenizer
    if not text:
        for offer in offers("sample_prompt"):
            prompt = offer(settings, corpus)
            if prompt is not None:
                return prompt
        question = first_question(corpus.val, tokenizer)
        if question is not None:
            return question
    elif corpus.train.has_conversations and tokenizer.chat_template is not None:
        from thinker.data.chat import chat  # texts do not need it

        message: Message = {"role": "user", "content": text}
        try:
            return SamplePrompt(text, chat.encode_prompt(tokenizer, [message]))
        except UserError as error:
            raise UserError(f"train.sample_prompt: {error}") from error
    tokens = [*tokenizer.bos_prefix, *tokenizer.encode(text)] or [tokenizer.bos_id]
    return SamplePrompt(text, tokens)


def first_question(split: TokenShards, tokenizer: Tokenizer) -> SamplePrompt | None:
    """What is before the first answer of a split; None if nothing is."""
    if not split.shards or split.shards[0].loss_mask is None:
        return None
    shard = split.shards[0]
    begin, end = shard.offsets[0:2].tolist()
    is_target = shard.loss_mask[begin:end] != 0
    tokens = shard.tokens[begin:end][: int(is_target.argmax())].tolist()
    text = tokenizer.decode(tokens[len(tokenizer.bos_prefix) :]).strip()
    if not text:
        return None
    return SamplePrompt(text, tokens)


class Samples(Callback):
    """Takes samples as train.sample_every says: prints each as one line, and writes it to
    samples.jsonl."""

    def __init__(self, settings: Settings, corpus: Corpus) -> None:
        self.train = settings.train
        self.every = self.train.sample_every
        self.tokenizer = corpus.tokenizer
        self.prompt = find_prompt(settings, corpus)
        self.share = 0.0  # of the run that is done

    def setup(self, parts: TrainingParts) -> None:
        """Raise UserError if the prompt does not fit the model.

        Without a prompt, a model that reads a prefix takes no samples by default.
        """
        config = parts.model.config
        fits = config.prefix <= len(self.prompt.tokens) <= config.max_cached_len
        if not fits and not self.train.sample_prompt:  # a question of the text
            self.prompt = SamplePrompt("", [self.tokenizer.bos_id])
        tokens = self.prompt.tokens
        if self.every == "auto" and not self.prompt.text and len(tokens) < config.prefix:
            self.every = None
            if parts.dist.is_main:
                print(
                    f"no samples: they need a prompt of {config.prefix} tokens for the model's "
                    "bidirectional prefix; set train.sample_prompt",
                    file=sys.stderr,
                )
            return
        if not config.prefix <= len(tokens) <= config.max_cached_len:
            from thinker.generation.sequence import check_prompt  # to say what is wrong

            check_prompt(tokens, self.tokenizer, config, config.max_cached_len)

    def on_start(self, run: TrainingRun) -> None:
        """Keep the run, and how much of it is done."""
        self.run = run
        self.share = run.state.share_of_length(self.train)

    def is_due(self, step: int) -> bool:
        """Whether to take a sample after this step, which has just been made."""
        before = self.share
        self.share = self.run.state.share_of_length(self.train)
        if self.every is None:
            return False
        if self.every == "auto":
            return reaches_share(before, self.share, count_samples(self.train.max_steps))
        return step % self.every == 0

    def on_step_end(self, info: StepInfo) -> None:
        """Take a sample if it is time to."""
        if not self.is_due(info.step):
            return
        run = self.run
        run.show_status(f"step {info.step}, sampling")
        text = self.sample(info.step)
        if text is None:
            return
        if run.directory.writes:
            gap = ""
            if self.tokenizer.chat_template is not None:  # then the sample is an answer
                gap = " "
            line = " ".join(f"{self.prompt.text}{gap}{text}".split())
            Progress.write(f"step {info.step}: {line}", file=sys.stderr)
            run.directory.log_sample(info.step, self.prompt.text, text)
        for callback in run.parts.callbacks:
            callback.on_sample(info.step, self.prompt.text, text)

    def sample(self, step: int) -> str | None:
        """What the current model writes after the prompt, drawn on rank 0; None if its logits are
        not finite. All ranks must call this."""
        generator = self._generator()
        text = None
        if generator is not None:
            from thinker.generation import SamplingParams

            params = SamplingParams(max_new_tokens=MAX_TOKENS, temperature=TEMPERATURE, seed=step)
            try:
                prompt = self.prompt
                text = generator.generate([prompt.text], params, [prompt.tokens])[0].text
            except RunError as error:  # training goes on and checks the next loss
                Progress.write(f"step {step}: {error}", file=sys.stderr)
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
