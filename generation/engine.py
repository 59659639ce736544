"""Generator: prefill and decoding for batches of prompts of different lengths."""

import itertools
import math
import operator
from collections.abc import Iterator
from functools import partial
from typing import get_type_hints

import torch
from torch import Tensor

from thinker.data.tokenizers.tokenizer import Tokenizer
from thinker.features.early_exit.decoder import EarlyExitThinker
from thinker.features.monitoring.monitor import Monitor
from thinker.features.retrieval.retrieval_cache import new_windowed_cache
from thinker.features.speculation.speculation import DraftModel, PromptLookup, max_draft_len
from thinker.features.structured_output.constraints import Constraint
from thinker.generation import prompts as checks
from thinker.generation.batch_sampling import sample_next, sample_steps
from thinker.generation.caches.cache_rows import copy_row
from thinker.generation.caches.quantized_cache import make_cache
from thinker.generation.decoders.compiled_decoder import CompiledThinker
from thinker.generation.decoders.inference_model import fuse_for_inference
from thinker.generation.decoders.native_decoder import NativeThinker
from thinker.generation.option_checks import check_options
from thinker.generation.sampler import SamplingParams
from thinker.generation.scoring import score_text
from thinker.generation.sequence import Completion, SampledToken, Score, Sequence
from thinker.generation.sliding import decode_sliding
from thinker.model import KVCache, Thinker
from thinker.native.compiler import load_library
from thinker.native.operations import FORMATS
from thinker.runtime.checks import check_types, describe
from thinker.runtime.device import choose_dtype, to_device
from thinker.runtime.errors import UserError

Params = SamplingParams | list[SamplingParams] | None
STEPS_PER_READ = 16  # on a GPU, to synchronize less often


class Generator:
    """Generates text with a Thinker: batches, streaming, scores, speculative decoding.

    Works on a copy of the weights. Raises UserError if options contradict each other or do not suit the model.
    """

    def __init__(
        self,
        model: Thinker,
        tokenizer: Tokenizer,  # as used in training
        use_cache: bool = True,  # False: recompute all positions at every step, for comparison
        *,
        dtype: torch.dtype
        | str
        | None = None,  # of weights, activations and cache; also a name, such as "bf16"
        bits: int
        | dict
        | None = None,  # store the weights in 8 or 4 bits, or by matrix (generation.mixed_bits)
        compile: bool
        | None = None,  # on a CPU: kernels in C (default: if they compile); on a GPU: CUDA graphs
        window: int
        | None = None,  # attend to the newest `window` positions, in texts of any length
        sinks: int = 0,  # with `window`, also attend to the first `sinks` positions
        retrieve: int = 0,  # with `window`, each query also attends to the best blocks of evicted positions
        retrieve_block: int = 32,  # positions per block
        cache_bits: int
        | None = None,  # 8 or 4: store keys and values in so few bits (generation.quantized_cache)
        slide: bool = False,  # continue from the newest half when the context is full (generation.sliding)
        speculate: int = 0,  # tokens to draft per step, by prompt lookup or `draft`; the text is the same
        draft: Thinker | None = None,  # smaller model with the same tokenizer, for `speculate`
        early_exit: float
        | None = None,  # skip later layers at this probability (generation.early_exit)
        monitor: Monitor
        | None = None,  # measures attention at some positions; does not change the text
    ) -> None:
        if not isinstance(tokenizer, Tokenizer):
            raise UserError(
                f"tokenizer is {describe(tokenizer)}; pass the model's tokenizer, as returned by load()"
            )
        check_types(get_type_hints(Generator.__init__), locals())
        config, dtype = model.config, choose_dtype(dtype or model.dtype)
        self.config, self.tokenizer, self.use_cache, self.monitor = (
            config,
            tokenizer,
            use_cache,
            monitor,
        )
        self.window, self.sinks, self.retrieve, self.retrieve_block = (
            window,
            sinks,
            retrieve,
            retrieve_block,
        )
        self.speculate, self.bits, self.cache_bits, self.early_exit = (
            speculate,
            bits,
            cache_bits,
            early_exit,
        )
        check_options(self, bool(compile), bits, draft, model.device.type == "cpu")
        self.kernel_problem = ""  # why decoding uses no native kernels, if nobody asked for that
        self.native = self._use_native(model, dtype, compile)
        self.supports_window = use_cache and config.is_plain
        self.slide = slide and config.prefix == 0
        self.context_len = config.max_cached_len if use_cache else config.max_seq_len
        if window is not None or (config.is_unbounded and use_cache):
            self.context_len = math.inf
        self.model = fuse_for_inference(model, dtype, bits, self.native)
        if monitor is not None:
            monitor.calibrate(self.model)
        self.decode_model = NativeThinker(self.model) if self.native else self.model
        if compile and not self.native:
            self.decode_model = CompiledThinker(self.model)
        if early_exit is not None:
            self.decode_model = EarlyExitThinker(self.model, early_exit)
        self.draft = None if draft is None else fuse_for_inference(draft, dtype, bits, self.native)
        # Tokens per row to sample before the host reads them; those after the end of a text are dropped.
        can_drop = use_cache and not speculate and window is None and early_exit is None
        self.steps_per_read = STEPS_PER_READ if can_drop and self.model.device.type == "cuda" else 1

    def _use_native(self, model: Thinker, dtype: torch.dtype, compile: bool | None) -> bool:
        """Whether to use native kernels. Raises UserError if `compile` demands them and they are not available."""
        if model.device.type != "cpu" or compile is False or self.early_exit is not None:
            return False
        if dtype not in FORMATS:
            problem = f"kernels in C support fp32 and bf16, not {dtype}".replace("torch.", "")
        else:
            try:
                load_library()
                return True
            except UserError as error:
                problem = str(error)
        if compile:
            raise UserError(f"compile is not available: {problem}; use compile=False")
        self.kernel_problem = problem
        return False

    @property
    def is_batch_invariant(self) -> bool:
        """Whether a text has the same logits, to the bit, in any batch and however it is split into passes."""
        return isinstance(self.decode_model, NativeThinker) and self.decode_model.is_batch_invariant

    def __repr__(self) -> str:
        where = f"{self.model.dtype} on {self.model.device}"
        return f"Generator({self.tokenizer}, context of {self.context_len} tokens, {where})"

    def generate(
        self,
        prompts: str | list[str],
        params: Params = None,
        prompt_tokens: list[list[int]] | None = None,
    ) -> list[Completion]:
        """Continue prompts in one batch; equal prompts are read once. Raises UserError for invalid arguments.

        `params`: one per prompt, or one for all (prompt i gets seed + i). `prompt_tokens`: by default encoded.
        """
        completions = [Completion(prompt) for prompt in checks.prompt_list(prompts)]
        for _ in self.stream_batch(completions, params, prompt_tokens):
            pass
        return completions

    def stream(self, prompt: str, params: SamplingParams | None = None) -> Iterator[str]:
        """Continue one prompt, yielding text as it is generated; the joined pieces equal the text of generate()."""
        return (
            piece
            for _, piece in self.stream_batch(
                [Completion(checks.check_text(prompt, "the prompt"))], params
            )
        )

    def stream_batch(
        self,
        completions: list[Completion],
        params: Params = None,
        prompt_tokens: list[list[int]] | None = None,
    ) -> Iterator[tuple[int, str]]:
        """Fill in Completions, yielding (index, newly certain text). Parameters and errors as in generate()."""
        params = checks.params_list(params, len(completions))
        tokens = checks.token_lists(prompt_tokens, completions, self.encode)
        sequences = [
            self.new_sequence(*each) for each in zip(itertools.count(), completions, params, tokens)
        ]
        start = partial(self._prefill_unique, self.model, slack=self.speculate)
        yield from decode_sliding(self, sequences, start)

    def encode(self, prompt: str) -> list[int]:
        """Encode a prompt, with a BOS token if the model was trained with one."""
        ids = self.tokenizer.encode(checks.check_text(prompt, "the prompt"))
        return [*self.tokenizer.bos_prefix, *ids] or [self.tokenizer.bos_id]

    def new_sequence(
        self, index: int, completion: Completion, params: SamplingParams, tokens: list[int]
    ) -> Sequence:
        """Create a sequence that starts with `tokens`. Raises UserError if the tokens or the parameters are invalid."""
        hint = (
            ", or use --window N to attend to the newest N tokens" if self.supports_window else ""
        )
        checks.check_prompt(
            tokens, self.tokenizer, self.config, self.context_len, hint, params.logit_bias
        )
        completion.prompt_tokens = len(tokens)
        # The model does not read the last token, so n positions allow n + 1 tokens.
        n_new = min(params.max_new_tokens, self.context_len + 1 - len(tokens))
        n_later = params.max_new_tokens - n_new if self.slide else 0
        constraint = None
        if params.json_schema is not None or params.regex is not None:
            if self.speculate:
                raise UserError(
                    "json_schema and regex cannot be combined with speculate; use speculate=0"
                )
            constraint = Constraint(
                self.tokenizer, params.json_schema, params.regex, params.logit_bias
            )
        return Sequence(
            index,
            completion,
            params,
            list(tokens),
            n_new,
            self.tokenizer,
            n_later,
            constraint=constraint,
        )

    def new_cache(self, model: Thinker, batch_size: int, max_len: int) -> KVCache:
        """Create an empty cache, of bounded size with a window."""
        if self.window is not None:
            return new_windowed_cache(
                model, batch_size, self.window, self.sinks, self.retrieve, self.retrieve_block
            )
        return make_cache(
            model,
            batch_size,
            max_len,
            max(self.speculate, self.steps_per_read - 1),
            self.cache_bits,
        )

    @torch.no_grad()
    def prefill(self, model: Thinker, tokens: list[list[int]], cache: KVCache) -> Tensor:
        """Read tokens (B, T) into a cache. Returns the logits after the last tokens, (B, 1, V)."""
        if model is self.model and isinstance(self.decode_model, NativeThinker):
            model = self.decode_model
        cache_bits = None if self.is_batch_invariant else self.cache_bits
        lengths = checks.pass_lengths(
            cache.lengths[0], len(tokens[0]), self.config.prefix, cache_bits
        )
        for chunk in torch.tensor(tokens, device=self.model.device).split(lengths, dim=1):
            logits = model(chunk, cache=cache, last_logits_only=True)
        return logits

    def decode(
        self, sequences: list[Sequence], cache: KVCache | None, logits: Tensor
    ) -> Iterator[tuple[int, str]]:
        """Decode from logits (B, 1, V) until all sequences have ended. Yields (sequence.index, newly certain text)."""
        drafter = PromptLookup(self.speculate) if self.speculate else None
        if self.draft is not None:
            drafter = DraftModel(self.draft, self.speculate, self._prefill_unique)
        drafts: list[list[int]] = [[] for _ in sequences]
        while True:
            if drafter is None:
                sampled = self.sample(
                    sequences, cache, logits, min(one.n_remaining for one in sequences)
                )
            else:
                sampled = sample_next(sequences, drafts, logits)
            unfinished = []
            for row, sequence in enumerate(sequences):
                completion, n_before = sequence.completion, len(sequence.tokens)
                text, ended = sequence.extend(sampled[row])
                completion.drafted += len(drafts[row])
                completion.accepted += sum(
                    map(operator.eq, drafts[row], sequence.tokens[n_before:])
                )
                if text:
                    yield sequence.index, text
                if not ended:
                    unfinished.append(row)
            if not unfinished:
                return
            if len(unfinished) < len(sequences):
                sequences = [sequences[row] for row in unfinished]
                for batch in (cache, drafter):
                    if batch is not None:
                        batch.select(unfinished)
            if self.monitor is not None:
                self.monitor.observe(self.model, sequences, partial(copy_row, cache))
            drafts, logits = self._decode_step(sequences, cache, drafter)

    def sample(
        self, sequences: list[Sequence], cache: KVCache | None, logits: Tensor, max_steps: int,
        rows: list[int] | None = None,
    ) -> list[list[SampledToken]]:  # fmt: skip
        """Sample a token per sequence from logits (B, 1, V), or up to `max_steps` if the model can run in between.

        `rows`: the rows of the sequences in the cache (default: all, in order).
        """
        step = self.decode_model
        unfiltered = [row for row, sequence in enumerate(sequences) if sequence.is_unfiltered]
        if not isinstance(step, NativeThinker) or not unfiltered:
            has_constraint = any(sequence.constraint is not None for sequence in sequences)
            n_steps = 1 if has_constraint else min(self.steps_per_read, max_steps)
            return sample_steps(sequences, logits, n_steps, partial(step, cache=cache))
        if len(unfiltered) == len(sequences):
            return step.sample(sequences, cache, logits, max_steps, rows)
        others = [row for row in range(len(sequences)) if row not in unfiltered]
        fast = [sequences[row] for row in unfiltered]
        tokens = dict(zip(unfiltered, step.sample(fast, cache, logits[unfiltered], 1)))
        tokens |= zip(
            others, sample_steps([sequences[row] for row in others], logits[others], 1, step)
        )
        return [tokens[row] for row in range(len(sequences))]

    def score(self, text: str, n_top: int = 0, progress: bool = False) -> Score:
        """Compute the log-probability of every token of a text; see generation.scoring.score_text()."""
        return score_text(self, text, n_top, progress)

    def _prefill_unique(
        self, model: Thinker, sequences: list[Sequence], slack: int
    ) -> tuple[KVCache | None, Tensor]:
        """Read each distinct prompt once, equal lengths together. Returns a cache and logits, (B, 1, V)."""
        if not self.use_cache:
            return None, self._uncached_logits(sequences)
        max_len = max(len(sequence.tokens) + sequence.n_remaining for sequence in sequences) + slack
        checks.check_cache_fits(self, model, len(sequences), max_len)
        prompts = sorted(dict.fromkeys(tuple(sequence.tokens) for sequence in sequences), key=len)
        caches, logits = [], []
        for group in (list(group) for _, group in itertools.groupby(prompts, key=len)):
            caches.append(self.new_cache(model, len(group), max_len))
            logits.append(self.prefill(model, group, caches[-1]))
        cache, *others = caches
        for other in others:
            cache.concat_rows(other)
        logits = torch.cat(logits)
        rows = [prompts.index(tuple(sequence.tokens)) for sequence in sequences]
        if rows != list(range(len(prompts))):
            cache.select(rows)
            logits = logits[rows]
        return cache, logits

    @torch.no_grad()
    def _decode_step(
        self,
        sequences: list[Sequence],
        cache: KVCache | None,
        drafter: PromptLookup | DraftModel | None,
    ) -> tuple[list[list[int]], Tensor]:
        """Read the newest token and drafts of each sequence. Returns drafts and the logits after each, (B, T, V)."""
        if cache is None:
            return [[] for _ in sequences], self._uncached_logits(sequences)
        cache.truncate(
            [len(sequence.tokens) - 1 for sequence in sequences]
        )  # drops rejected drafts
        drafts = [[] for _ in sequences] if drafter is None else drafter.propose(sequences)
        max_len = max_draft_len(self.config, sequences)
        drafts = [draft[:max_len] for draft in drafts]
        longest = max(map(len, drafts))
        rows = [
            [one.tokens[-1], *draft, *[0] * (longest - len(draft))]
            for one, draft in zip(sequences, drafts)
        ]
        is_step = longest == 0 or isinstance(self.decode_model, NativeThinker)
        model = self.decode_model if is_step else self.model
        return drafts, model(to_device(rows, self.model.device), cache=cache)

    @torch.no_grad()
    def _uncached_logits(self, sequences: list[Sequence]) -> Tensor:
        """Compute the logits after each sequence, (B, 1, V), in one pass over all its tokens."""
        rows = (torch.tensor([sequence.tokens], device=self.model.device) for sequence in sequences)
        return torch.cat([self.model(row, last_logits_only=True) for row in rows])
