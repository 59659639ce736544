"""Generator: from prompts to texts, for batches of prompts of different lengths."""

import math
import operator
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, get_type_hints

import torch
from torch import Tensor

from thinker.data.tokenizers.tokenizer import Tokenizer
from thinker.generation import parts
from thinker.generation.caches.cache_factory import copy_row
from thinker.generation.decoders.prefill import read_prompts
from thinker.generation.mixed_bits import check_bits
from thinker.generation.sampling_params import SamplingParams, check_text, params_per_prompt
from thinker.generation.sequence import Completion, Sequence, check_prompt
from thinker.generation.setup import Setup
from thinker.model import KVCache, Thinker
from thinker.runtime.checks import check_types, describe
from thinker.runtime.device import choose_dtype, to_device
from thinker.runtime.errors import UserError

if TYPE_CHECKING:
    from thinker.generation.scoring import Score

Params = SamplingParams | list[SamplingParams] | None
Piece = tuple[int, str]  # index of a sequence, and its newly certain text


class Generator:
    """Generates text with a Thinker: batches, streaming, scores.

    Works on a copy of the weights. Raises UserError if options contradict each other or do not suit
    the model.

    Args:
        tokenizer: as used in training.
        use_cache: False: recompute all positions at every step, for comparison.
        dtype: of weights, activations and cache; also a name, such as "bf16".
        bits: store the weights in 8 or 4 bits, or by matrix (generation/mixed_bits.py).
        compile: on a CPU: kernels in C (default: if they compile); on a GPU: CUDA graphs of fused
            kernels (default: if they know the model), or of what torch compiles.
        window: attend to the newest `window` positions, in texts of any length.
        sinks: with `window`, also attend to the first `sinks` positions.
        cache_bits: 8 or 4: store keys and values in so few bits (caches/quantized_cache.py).
        slide: continue from the newest half when the context is full (Sequence.slide()).
        options: of features, which the reference lists below this class.
    """

    def __init__(
        self,
        model: Thinker,
        tokenizer: Tokenizer,
        use_cache: bool = True,
        *,
        dtype: torch.dtype | str | None = None,
        bits: int | dict | None = None,
        compile: bool | None = None,
        window: int | None = None,
        sinks: int = 0,
        cache_bits: int | None = None,
        slide: bool = False,
        **options: Any,
    ) -> None:
        if not isinstance(tokenizer, Tokenizer):
            wanted = "pass the model's tokenizer, as returned by load()"
            raise UserError(f"tokenizer is {describe(tokenizer)}; {wanted}")
        own = _own_options()
        check_types(own, locals())
        parts.check_names(options, list(own))
        config = model.config
        if tokenizer.vocab_size > config.vocab_size:
            n_ids = tokenizer.vocab_size
            raise UserError(f"tokenizer has {n_ids} ids, more than the model's {config.vocab_size}")
        check_bits(bits, config.n_layers)
        dtype = choose_dtype(dtype or model.dtype)
        setup = Setup(model, tokenizer, use_cache, dtype, bits, compile, window, sinks, cache_bits)
        self.config = config
        self.tokenizer = tokenizer
        self.use_cache = use_cache
        self.bits = bits
        self.slide = slide and config.prefix == 0
        self.supports_window = use_cache and config.is_plain
        self.caches = parts.build_caches(setup, options)
        self.decoder = parts.build_decoder(setup, self.caches, options)
        self.drafting = parts.build_drafting(setup, self.caches, self.decoder, options)
        self.observers = parts.build_observers(setup, self.caches, self.decoder, options)
        self.context_len = self._context_len()

    def _context_len(self) -> float:
        """Tokens that a text can have before it slides or ends."""
        if not self.use_cache:
            return self.config.max_seq_len
        if self.caches.is_unbounded or self.config.is_unbounded:
            return math.inf
        return self.config.max_cached_len

    @property
    def model(self) -> Thinker:
        """The copy of the model that decodes."""
        return self.decoder.model

    @property
    def max_drafts(self) -> int:
        """Tokens that may be drafted per step."""
        return 0 if self.drafting is None else self.drafting.max_len

    @property
    def is_batch_invariant(self) -> bool:
        """Whether a text has the same logits, to the bit, in any batch and any split into
        passes."""
        return self.decoder.is_batch_invariant

    @property
    def kernel_problem(self) -> str:
        """Why decoding uses no kernels although nobody asked for that, or ""."""
        return self.decoder.kernel_problem

    def __repr__(self) -> str:
        where = f"{self.model.dtype} on {self.model.device}"
        return f"Generator({self.tokenizer}, context of {self.context_len} tokens, {where})"

    def generate(
        self,
        prompts: str | list[str],
        params: Params = None,
        prompt_tokens: list[list[int]] | None = None,
    ) -> list[Completion]:
        """Continue prompts in one batch; equal prompts are read once.

        `params`: one per prompt, or one for all (prompt i gets seed + i). `prompt_tokens`: by
        default, the prompts are encoded. Raises UserError for invalid arguments.
        """
        completions = [Completion(prompt) for prompt in _prompt_list(prompts)]
        for _ in self.stream_batch(completions, params, prompt_tokens):
            pass
        return completions

    def stream(self, prompt: str, params: SamplingParams | None = None) -> Iterator[str]:
        """Continue one prompt, yielding text as it is generated.

        The joined pieces equal the text of generate().
        """
        completion = Completion(check_text(prompt, "the prompt"))
        return (piece for _, piece in self.stream_batch([completion], params))

    def stream_batch(
        self,
        completions: list[Completion],
        params: Params = None,
        prompt_tokens: list[list[int]] | None = None,
    ) -> Iterator[Piece]:
        """Fill in Completions, yielding (index, newly certain text).

        Parameters and errors as in generate().
        """
        params = params_per_prompt(params, len(completions))
        if prompt_tokens is None:
            prompt_tokens = [self.encode(completion.prompt) for completion in completions]
        else:
            prompt_tokens = _token_lists(prompt_tokens, len(completions))
        sequences = []
        for index, completion in enumerate(completions):
            sequences.append(
                self.new_sequence(index, completion, params[index], prompt_tokens[index])
            )
        yield from self.decode_all(sequences, self._read_prompts)

    def encode(self, prompt: str) -> list[int]:
        """Encode a prompt, with a BOS token if the model was trained with one."""
        ids = self.tokenizer.encode(check_text(prompt, "the prompt"))
        return [*self.tokenizer.bos_prefix, *ids] or [self.tokenizer.bos_id]

    def new_sequence(
        self,
        index: int,
        completion: Completion,
        params: SamplingParams,
        tokens: list[int],
        tokenizer: Tokenizer | None = None,
    ) -> Sequence:
        """A sequence that starts with `tokens`.

        `tokenizer`: what decodes the text, if not the model's own. Raises UserError if the tokens
        or the parameters are invalid.
        """
        hint = ""
        if self.supports_window:
            hint = ", or use --window N to attend to the newest N tokens"
        limit = self.context_len
        check_prompt(tokens, self.tokenizer, self.config, limit, hint, params.logit_bias)
        completion.prompt_tokens = len(tokens)
        # The model does not read the last token, so n positions allow n + 1 tokens.
        n_new = min(params.max_new_tokens, limit + 1 - len(tokens))
        decoding = self.tokenizer if tokenizer is None else tokenizer
        sequence = Sequence(index, completion, params, list(tokens), n_new, decoding)
        if self.slide:
            sequence.n_after_sliding = params.max_new_tokens - n_new
        if params.json_schema is not None or params.regex is not None:
            if self.drafting is not None:
                option = self.drafting.option
                raise UserError(
                    f"json_schema and regex cannot be combined with {option}; use {option}=0"
                )
            from thinker.generation.constraint import constraint_source

            sequence.constraint = constraint_source().new_constraint(
                self.tokenizer, params.json_schema, params.regex, params.logit_bias
            )
        return sequence

    def new_cache(self, batch_size: int, max_len: int) -> KVCache:
        """An empty cache for texts of up to `max_len` tokens. Raises UserError if it is too big."""
        return self.caches.new(self.model, batch_size, max_len, self._slack)

    @property
    def _slack(self) -> int:
        """Newest positions that may have to be removed from a cache after a step."""
        if self.drafting is not None:
            return self.drafting.max_len
        return self.decoder.steps_per_read - 1

    def prefill(self, tokens: list[list[int]], cache: KVCache) -> Tensor:
        """Read tokens (B, T) into a cache. Returns the logits after the last ones, (B, 1, V)."""
        return self.decoder.prefill(torch.tensor(tokens, device=self.model.device), cache)

    def decode_all(
        self,
        sequences: list[Sequence],
        start: Callable[[list[Sequence]], tuple[KVCache | None, Tensor]],
    ) -> Iterator[Piece]:
        """Decode sequences until every text has ended, sliding those that fill the context.

        start(sequences) reads them; it returns their cache and the logits after each, (B, 1, V).
        When a sequence has context_len + 1 tokens, it continues from its newest context_len // 2
        tokens as a new text. The samples equal those of reading these tokens from scratch at every
        step. Penalties still count the whole text.
        """
        while sequences:
            yield from self.decode(sequences, *start(sequences))
            full = []
            for sequence in sequences:
                self._count_evicted(sequence)
                if sequence.completion.finish_reason != "stop" and sequence.n_after_sliding:
                    sequence.slide(self.context_len)
                    full.append(sequence)
            sequences = full

    def _count_evicted(self, sequence: Sequence) -> None:
        n_read = len(sequence.tokens) - 1
        completion = sequence.completion
        completion.n_evicted = self.caches.n_evicted(n_read)
        completion.stored_bytes = self.caches.stored_bytes(self.config, n_read)

    def decode(
        self, sequences: list[Sequence], cache: KVCache | None, logits: Tensor
    ) -> Iterator[Piece]:
        """Decode from logits (B, 1, V) until all sequences have ended.

        Yields (sequence.index, newly certain text).
        """
        if self.drafting is not None:
            from thinker.generation.drafting import decode_with_drafts

            drafter = self.drafting.new_drafter()
            arguments = (self.decoder, drafter, sequences, cache, logits, self._observe)
            yield from decode_with_drafts(*arguments)
            return
        while True:
            n_steps = self.n_steps(sequences)
            sampled = self.decoder.sample(sequences, cache, logits, n_steps)
            unfinished = []
            for row, sequence in enumerate(sequences):
                text, has_ended = sequence.extend(sampled[row])
                if text:
                    yield sequence.index, text
                if not has_ended:
                    unfinished.append(row)
            if not unfinished:
                return
            if len(unfinished) < len(sequences):
                sequences = [sequences[row] for row in unfinished]
                if cache is not None:
                    cache.select(unfinished)
            self._observe(sequences, cache)
            logits = self._decode_step(sequences, cache)

    def n_steps(self, sequences: list[Sequence]) -> int:
        """Tokens that a step may sample for each of the sequences."""
        limits = [sequence.n_remaining for sequence in sequences]
        limits += [observer.max_tokens() for observer in self.observers]
        return min(limits)

    def _observe(self, sequences: list[Sequence], cache: KVCache | None) -> None:
        """Show the texts to all observers."""
        for observer in self.observers:
            observer.observe(self.model, sequences, partial(copy_row, cache))

    @torch.no_grad()
    def _decode_step(self, sequences: list[Sequence], cache: KVCache | None) -> Tensor:
        """Read the newest token of each sequence. Returns the logits after it, (B, 1, V)."""
        if cache is None:
            return self._uncached_logits(sequences)
        # A decoder may have read tokens that it sampled after the end of a text (Decoder.sample).
        cache.truncate([len(sequence.tokens) - 1 for sequence in sequences])
        newest = [[sequence.tokens[-1]] for sequence in sequences]
        return self.decoder.step(to_device(newest, self.model.device), cache)

    def _read_prompts(self, sequences: list[Sequence]) -> tuple[KVCache | None, Tensor]:
        """Read sequences from their beginning. Returns a cache and the logits after each."""
        if not self.use_cache:
            return None, self._uncached_logits(sequences)
        return read_prompts(self.decoder, self.caches, sequences, self.max_drafts, self._slack)

    @torch.no_grad()
    def _uncached_logits(self, sequences: list[Sequence]) -> Tensor:
        """The logits after each sequence, (B, 1, V), in one pass over all its tokens."""
        logits = []
        for sequence in sequences:
            tokens = torch.tensor([sequence.tokens], device=self.model.device)  # (1, T)
            logits.append(self.model(tokens, last_logits_only=True))
        return torch.cat(logits)

    def score(self, text: str, n_top: int = 0, progress: bool = False) -> "Score":
        """The log-probability of every token of a text; see generation.scoring.score_text()."""
        from thinker.generation.scoring import score_text

        return score_text(
            self.model,
            self.tokenizer,
            self.new_cache,
            self.context_len,
            text,
            n_top=n_top,
            progress=progress,
        )


def _own_options() -> dict[str, Any]:
    """The options of a Generator that are not those of features, with their types."""
    hints = get_type_hints(Generator.__init__)
    return {name: hints[name] for name in hints if name not in ("options", "return")}


def _prompt_list(prompts: str | list[str]) -> list[str]:
    """Prompts as a list; a string is one prompt. Raises UserError for other types."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, (list, tuple)):
        raise UserError(f"prompts is a {type(prompts).__name__}; pass a str or a list of str")
    return [check_text(prompt, f"prompt {index}") for index, prompt in enumerate(prompts)]


def _token_lists(prompt_tokens: list[list[int]], n_prompts: int) -> list[list[int]]:
    """The token ids of each prompt as lists of int. Raises UserError for anything else."""
    try:
        lists = [list(map(operator.index, tokens)) for tokens in prompt_tokens]
    except TypeError:
        wanted = "pass a list of token ids (integers) per prompt"
        raise UserError(f"prompt_tokens is not valid; {wanted}") from None
    if len(lists) != n_prompts:
        raise UserError(
            f"prompt_tokens has {len(lists)} lists for {n_prompts} prompts; pass one per prompt"
        )
    return lists
