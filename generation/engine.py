"""Prefill, then one token after the other, for any number of prompts of unequal length."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinker.data.tokenizer import Tokenizer
from thinker.generation.compiled_decode import CompiledThinker
from thinker.generation.inference_model import prepare_for_inference
from thinker.generation.sampler import SamplingParams
from thinker.generation.sequence import Completion, Row, SampledToken, choose, top_logprobs
from thinker.generation.sink_cache import SinkCache
from thinker.generation.speculation import DraftModel, PromptLookup, check_draft_model, room
from thinker.model import KVCache, Thinker, ThinkerConfig
from thinker.model.patterns import Linear
from thinker.runtime.errors import UserError

PREFILL_CHUNK = 512  # positions a pass: what a long prompt needs in memory does not grow with it


@dataclass(frozen=True)
class Score:
    """How likely a text is under the model, from the BOS token that begins it."""

    token_ids: list[int]
    logprobs: list[float]  # of each token, given all before it, in nats
    top_logprobs: list[dict[int, float]]  # at each place, of the likeliest tokens
    n_bytes: int

    @property
    def nats(self) -> float:
        """The whole text's."""
        return math.fsum(-logprob for logprob in self.logprobs)

    @property
    def bits_per_byte(self) -> float:
        """Per byte of UTF-8; 0 for an empty text."""
        return self.nats / math.log(2) / max(self.n_bytes, 1)


class Generator:
    """Samples from a Thinker, by a snapshot of its weights laid out for decoding.

    Args:
        thinker: stays as it is; what it learns later is not seen.
        use_cache: False recomputes every position at every step, to compare.
        dtype: of weights, activations and cache; the model's own unless given.
        int8: weights in int8 (generation.int8.Int8Linear).
        compile: the one-token step through torch.compile; on a GPU as a CUDA graph.
        window, sinks: remember the newest `window` positions and the first `sinks` ones alone, for texts of any length.
        speculate: draft so many tokens a step, by prompt lookup or by `draft`, a smaller Thinker with the same
            tokens. The text stays the same.

    Raises UserError where these do not go together.
    """

    def __init__(
        self,
        model: Thinker,
        tokenizer: Tokenizer,
        use_cache: bool = True,
        *,
        dtype: torch.dtype | None = None,
        int8: bool = False,
        compile: bool = False,
        window: int | None = None,
        sinks: int = 0,
        speculate: int = 0,
        draft: Thinker | None = None,
    ) -> None:
        self.config, self.tokenizer, self.use_cache = model.config, tokenizer, use_cache
        self.window, self.sinks, self.speculate = window, sinks, speculate
        longest = model.config.max_seq_len
        self.longest = model.config.max_cached_len if use_cache else longest  # positions of a text, if not endless
        self.can_roll = use_cache and model.config.is_plain
        self.endless = window is not None or (model.config.is_unbounded and use_cache)
        if sinks < 0 or (window is None and sinks):
            raise UserError(f"sinks is {sinks}; it must be at least 0, and goes with a window")
        if window is not None and not 1 <= window <= longest - sinks:
            raise UserError(
                f"a window of {window} and {sinks} sinks; the window must be at least 1, and both together at most "
                f"the model's context, {longest}: it has never seen tokens further apart"
            )
        if not 0 <= speculate <= 64:
            raise UserError(f"speculate is {speculate}; it must lie between 0 (none) and 64 drafted tokens a step")
        if draft is not None and not speculate:
            raise UserError("a draft model needs speculate, the number of tokens it drafts a step")
        for name, given in {"window": window, "speculate": speculate, "compile": compile}.items():
            if given and not use_cache:
                raise UserError(f"{name} works on the cache; it does not go without one")
        if compile and not model.config.is_plain:
            raise UserError("compile serves models with full attention, RoPE and plain scores; leave it out")
        if speculate and any(isinstance(layer, Linear) for layer in model.config.patterns):
            raise UserError("speculate takes back drafts that fail, and the sums of a linear layer forget nothing")
        if window is not None and not model.config.is_plain:
            raise UserError(
                "a window that is chosen when sampling goes with full attention and RoPE; leave it out: this model has "
                f"its own, model.attention={model.config.attention}, model.positions={model.config.positions}"
            )
        if window is not None and (speculate or compile):
            raise UserError(f"a window does not go with {'speculate' if speculate else 'compile'}")
        self.model = prepare_for_inference(model, dtype or model.dtype, int8)
        self.step = CompiledThinker(self.model) if compile else self.model
        self.draft = None
        if draft is not None:
            check_draft_model(model, draft, self.endless)
            self.draft = prepare_for_inference(draft, dtype or model.dtype, int8)

    def generate(
        self, prompts: Sequence[str], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Completion]:
        """Continue every prompt; the same prompt given several times is read once.

        Args:
            params: one for all, where row i draws by seed + i; or one for each prompt.

        Raises UserError where a prompt leaves no room in the context.
        """
        completions = [Completion(prompt) for prompt in prompts]
        for _ in self.stream_all(completions, params):
            pass
        return completions

    def stream(self, prompt: str, params: SamplingParams | None = None) -> Iterator[str]:
        """Continue one prompt, giving out text as it comes; joined, the pieces equal generate()'s text."""
        return self.stream_into(Completion(prompt), params)

    def stream_into(self, completion: Completion, params: SamplingParams | None = None) -> Iterator[str]:
        """stream() that fills in a Completion as it goes."""
        for _, piece in self.stream_all([completion], params):
            yield piece

    def stream_all(
        self,
        completions: list[Completion],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        prompts: list[list[int]] | None = None,
    ) -> Iterator[tuple[int, str]]:
        """Continue many at once, giving out pairs (which one, text that became certain); fills in the completions.

        `prompts`: their tokens; those of encode() unless given.
        """
        if params is None or isinstance(params, SamplingParams):
            base = params or SamplingParams()
            params = [dataclasses.replace(base, seed=base.seed + index) for index in range(len(completions))]
        if len(params) != len(completions):
            raise UserError(
                f"{len(completions)} prompts and {len(params)} sampling parameters: give one for each, or one"
            )
        rows = []
        for index, (completion, own) in enumerate(zip(completions, params)):
            tokens = self.encode(completion.prompt) if prompts is None else list(prompts[index])
            rows.append(self.new_row(index, completion, own, tokens))
        if rows:
            yield from self.decode(rows, *self._prefill(rows))

    def encode(self, prompt: str) -> list[int]:
        """A prompt as the model saw texts begin: mostly the BOS token, then its tokens. Raises UserError if too
        long."""
        tokens = [*self.tokenizer.bos_prefix, *self.tokenizer.encode(prompt)] or [self.tokenizer.bos_id]
        self.check_length(tokens)
        return tokens

    def check_length(self, tokens: list[int]) -> None:
        """Raises UserError where a text is longer than the context, and nothing says what to keep of it."""
        hint = ", or say with --window how many of the newest tokens to remember" if self.can_roll else ""
        check_length(tokens, self.config, math.inf if self.endless else self.longest, hint)

    def check_params(self, params: SamplingParams) -> None:
        """Raises UserError where the logit bias names a token that is none."""
        for token, _ in params.logit_bias:
            if token >= self.tokenizer.vocab_size:
                raise UserError(
                    f"logit_bias names the token {token}; the vocabulary ends at {self.tokenizer.vocab_size - 1}"
                )

    def new_row(self, index: int, completion: Completion, params: SamplingParams, tokens: list[int]) -> Row:
        """A sequence that begins with `tokens`, with as many to draw as are asked for and fit."""
        self.check_params(params)
        completion.prompt_tokens = len(tokens)
        # The last token drawn is never fed, so a context of n positions leads to n + 1 tokens.
        fit = params.max_new_tokens if self.endless else self.longest + 1 - len(tokens)
        return Row(index, completion, params, tokens, min(params.max_new_tokens, fit), self.tokenizer)

    @property
    def chunk(self) -> int:
        """Positions of a pass over a prompt; a prefix comes in one."""
        return max(PREFILL_CHUNK, self.config.prefix)

    @torch.no_grad()
    def feed(self, model: Thinker, tokens: list[list[int]], cache: KVCache) -> Tensor:
        """Add tokens, equally many for each row, to a cache; returns the logits after the last, (B, V)."""
        for begin in range(0, len(tokens[0]), self.chunk):
            chunk = torch.tensor([row[begin : begin + self.chunk] for row in tokens], device=model.device)
            logits = model(chunk, cache=cache, last_logits_only=True)[:, 0]  # (B, V)
        return logits

    def decode(self, rows: list[Row], cache: KVCache | None, logits: Tensor) -> Iterator[tuple[int, str]]:
        """Draw until every row has ended, from logits (B, 1, V) on. Yields pairs (index of the row, certain text)."""
        drafter = DraftModel(self.draft, self.speculate, self._new_cache_of) if self.draft else None
        if self.speculate and drafter is None:
            drafter = PromptLookup(self.speculate)
        drafts: list[list[int]] = [[] for _ in rows]
        while rows:
            kept = []
            for place, (row, drawn) in enumerate(zip(rows, self._choose(rows, drafts, logits))):
                row.completion.drafted += len(drafts[place])
                for number, one in enumerate(drawn):
                    piece, ended = row.take(one)
                    row.completion.accepted += drafts[place][number : number + 1] == [one.token]
                    if piece:
                        row.completion.text += piece
                        yield row.index, piece
                    if ended:
                        if self.window is not None:
                            row.completion.n_evicted = max(0, len(row.tokens) - 1 - self.sinks - self.window)
                        break
                else:
                    kept.append(place)
            if len(kept) < len(rows):
                rows = [rows[place] for place in kept]
                if cache is not None and kept:
                    cache.select(kept)
                if drafter is not None and kept:
                    drafter.select(kept)
            if rows:
                drafts, logits = self._advance(rows, cache, drafter)

    @torch.no_grad()
    def score(self, text: str, top: int = 0) -> Score:
        """The log-probability of every token of a text, by the passes that generation makes.

        A text longer than the context is read in windows that overlap by half, and each token counted once: it sees
        half a context at least. A rolling cache needs no windows. What a model reads both ways it does not predict:
        no token inside its prefix is counted. Raises UserError where there is no other.
        """
        ids = self.tokenizer.encode(text)
        tokens = [self.tokenizer.bos_id, *ids]
        size, given = self.longest, max(0, self.config.prefix - 1)  # of ids, not predicted
        if given and len(ids) <= given:
            raise UserError(
                f"the text has {len(tokens)} tokens; the model reads the first {given + 1} of any both ways"
            )
        logprobs: list[float] = []
        likeliest: list[dict[int, float]] = []
        begin = 0
        while given + len(logprobs) < len(ids):
            end = len(ids) if self.endless else min(begin + size, len(ids))
            cache = self.new_cache(self.model, 1, end - begin)
            for at in range(begin, end, self.chunk):  # tokens[begin:end] predict up to ids[end - 1]
                chunk = tokens[at : min(at + self.chunk, end)]
                logits = self.model(torch.tensor([chunk], device=self.model.device), cache=cache)[0]
                logits = logits[:, : self.tokenizer.vocab_size].float()  # the ids above stand for nothing
                counted = given + len(logprobs)
                known = logits.log_softmax(dim=-1)[max(0, counted - at) :]  # (T, V), those not yet counted
                targets = torch.tensor(ids[counted : at + len(chunk)], device=known.device)
                if len(targets):
                    logprobs += known.gather(1, targets[:, None])[:, 0].tolist()
                    likeliest += [top_logprobs(row, top) for row in known] if top else []
            begin = max(0, end - max(size // 2, given))
        return Score(ids[given:], logprobs, likeliest, len(self.tokenizer.decode_bytes(ids[given:])))

    @torch.no_grad()
    def _choose(self, rows: list[Row], drafts: list[list[int]], logits: Tensor) -> list[list[SampledToken]]:
        return choose(rows, drafts, logits)

    def _prefill(self, rows: list[Row]) -> tuple[KVCache | None, Tensor]:
        """Every prompt once, those of equal length together. Returns the cache and the logits (B, 1, V)."""
        if not self.use_cache:
            return None, self._uncached(rows)
        cache, logits, order = self._read(self.model, rows, self.speculate)
        if order != list(range(len(cache.lengths))):
            cache.select(order)
            logits = logits[order]
        return cache, logits[:, None]

    def _new_cache_of(self, model: Thinker, rows: list[Row], slack: int) -> KVCache:
        cache, _, order = self._read(model, rows, slack)
        cache.select(order)
        return cache

    def _read(self, model: Thinker, rows: list[Row], slack: int) -> tuple[KVCache, Tensor, list[int]]:
        """A cache and logits of the different prompts among the rows', and which of these each row has."""
        capacity = max(len(row.tokens) + row.limit for row in rows) + slack
        prompts = sorted(dict.fromkeys(tuple(row.tokens) for row in rows), key=len)
        cache, logits = None, []
        for length in sorted({len(prompt) for prompt in prompts}):
            group = [list(prompt) for prompt in prompts if len(prompt) == length]
            part = self.new_cache(model, len(group), capacity)
            logits.append(self.feed(model, group, part))
            if cache is None:
                cache = part
            else:
                cache.concat_rows(part)
        return cache, torch.cat(logits), [prompts.index(tuple(row.tokens)) for row in rows]

    def new_cache(self, model: Thinker, rows: int, capacity: int) -> KVCache:
        """An empty cache, rolling where there is a window."""
        if self.window is not None:
            return SinkCache(model, rows, self.window, self.sinks)
        return model.new_cache(rows, capacity, slack=self.speculate)

    @torch.no_grad()
    def _advance(
        self, rows: list[Row], cache: KVCache | None, drafter: PromptLookup | DraftModel | None
    ) -> tuple[list[list[int]], Tensor]:
        """Feed each row's newest token and its drafts. Returns the drafts and the logits after each, (B, T, V)."""
        if cache is None:
            return [[] for _ in rows], self._uncached(rows)
        cache.truncate([len(row.tokens) - 1 for row in rows])  # drafts that were not drawn
        drafts = [[] for _ in rows] if drafter is None else drafter.propose(rows)
        most = room(self.config, rows)
        drafts = [draft[: max(0, min(most, len(draft)))] for draft in drafts]
        width = max(map(len, drafts))
        batch = [[row.tokens[-1], *draft] + [0] * (width - len(draft)) for row, draft in zip(rows, drafts)]
        step = self.model if width else self.step
        return drafts, step(torch.tensor(batch, device=self.model.device), cache=cache)

    @torch.no_grad()
    def _uncached(self, rows: list[Row]) -> Tensor:
        passes = [
            self.model(torch.tensor([row.tokens], device=self.model.device), last_logits_only=True)[:, 0]
            for row in rows
        ]
        return torch.cat(passes)[:, None]  # (B, 1, V)


def check_length(tokens: list[int], config: ThinkerConfig, longest: float, hint: str = "") -> None:
    """Raises UserError where a prompt has more tokens than `longest`, or fewer than the model reads both ways."""
    if len(tokens) < config.prefix:
        raise UserError(
            f"the prompt has {len(tokens)} tokens; the model reads its first {config.prefix} both ways, so give as many"
        )
    if len(tokens) > longest:
        raise UserError(
            f"the prompt has {len(tokens)} tokens and the model's context is {longest}; "
            f"shorten it to at most {longest} tokens{hint}"
        )
