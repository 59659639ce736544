"""Speculative decoding: which drafts a Generator gets.

Drafts never change the text (see generation.drafting.sample_after_drafts()).
"""

from thinker.features.speculation.draft_model import DraftModel
from thinker.features.speculation.prompt_lookup import PromptLookup
from thinker.generation.caches.cache_factory import CacheFactory
from thinker.generation.decoders.decoder import Decoder
from thinker.generation.drafting import Drafter
from thinker.generation.setup import Setup
from thinker.model import Thinker, ThinkerConfig
from thinker.runtime.checks import check_types
from thinker.runtime.errors import UserError

MAX_DRAFTS = 64


class Speculation:
    """Drafts by prompt lookup, or by a smaller model (see Drafting)."""

    option = "speculate"

    def __init__(self, max_len: int, model: Thinker | None, caches: CacheFactory) -> None:
        """`model`: prepared for inference; None: prompt lookup."""
        self.max_len = max_len
        self.model = model
        self.caches = caches

    def new_drafter(self) -> Drafter:
        """As Drafting.new_drafter()."""
        if self.model is None:
            return PromptLookup(self.max_len)
        return DraftModel(self.model, self.max_len, self.caches)


def make_drafting(
    setup: Setup,
    caches: CacheFactory,
    decoder: Decoder,
    speculate: int = 0,
    draft: Thinker | None = None,
) -> Speculation | None:
    """For the options `speculate`, tokens to draft per step, and `draft`, a smaller model.

    The draft has the same tokenizer; without one, drafts come from the text. Returns None for 0
    tokens. Raises UserError if the options do not suit the model or other options.
    """
    check_types({"speculate": int, "draft": Thinker | None}, locals())
    if not 0 <= speculate <= MAX_DRAFTS:
        steps = f"use 0 (off) to {MAX_DRAFTS} drafted tokens per step"
        raise UserError(f"speculate is {speculate}; {steps}")
    if not speculate:
        if draft is not None:
            needed = "set it to the number of tokens to draft per step"
            raise UserError(f"draft needs speculate; {needed}")
        return None
    setup.need_cache("speculate")
    if not caches.can_roll_back:
        raise UserError(f"{caches.option} cannot be combined with speculate; use only one")
    if not decoder.is_exact:
        raise UserError(f"{decoder.option} cannot be combined with speculate; use only one")
    if caches.bits == 4:
        raise UserError("speculate cannot be combined with a cache in 4 bits; use 8 bits")
    patterns = list(setup.config.patterns)
    if draft is not None:
        patterns += draft.config.patterns
    if any(pattern.n_features for pattern in patterns):
        reason = "its state cannot be rolled back"
        raise UserError(f"speculate does not support linear attention: {reason}; use 0")
    if draft is None:
        return Speculation(speculate, None, caches)
    if isinstance(setup.bits, dict):
        raise UserError(
            "bits of each matrix cannot be combined with a draft, which has other matrices; "
            "use 8 or 4"
        )
    check_draft(draft.config, setup.config)
    return Speculation(speculate, setup.fuse(draft, decoder.has_kernels), caches)


def check_draft(draft: ThinkerConfig, config: ThinkerConfig) -> None:
    """Raise UserError if a model with the config `draft` cannot draft for one with `config`."""
    if draft.vocab_size != config.vocab_size:
        sizes = f"the draft has {draft.vocab_size} token ids, the model has {config.vocab_size}"
        raise UserError(f"{sizes}; use the same tokenizer")
    if draft.prefix > config.prefix:
        raise UserError(
            f"the draft's bidirectional prefix is {draft.prefix}; use at most {config.prefix}"
        )
    if draft.is_unbounded:
        return
    length = draft.max_cached_len
    if config.is_unbounded or length < config.max_cached_len:
        needed = f"at least {config.max_cached_len}"
        if config.is_unbounded:
            needed = "an unbounded context"
        raise UserError(
            f"the draft model's context is {length} tokens; use a draft model with {needed}"
        )
