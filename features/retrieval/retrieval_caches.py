"""Which caches a Generator gets with the option `retrieve`."""

import torch

from thinker.features.retrieval.block_store import stored_bytes
from thinker.features.retrieval.flags import DEFAULT_BLOCK
from thinker.features.retrieval.retrieval_cache import RetrievalCache, context_size, n_stored_blocks
from thinker.generation.caches.full_cache import REMEDY
from thinker.generation.caches.sink_cache import WindowCaches
from thinker.generation.sequence import Completion
from thinker.generation.setup import Setup
from thinker.model import KVCache, Thinker, ThinkerConfig
from thinker.runtime.checks import check_types
from thinker.runtime.errors import UserError
from thinker.runtime.memory import check_memory, format_bytes


class RetrievalCaches(WindowCaches):
    """Makes a RetrievalCache for each batch (see CacheFactory)."""

    is_observable = False

    def __init__(self, setup: Setup, window: int, sinks: int, retrieve: int, block: int) -> None:
        """Raises UserError if the options do not suit the model or other options."""
        if block < 1 or window % block:
            remedy = "use a block that divides the window"
            raise UserError(f"retrieve_block is {block} and window is {window}; {remedy}")
        super().__init__(setup, window, sinks)
        size = context_size(window, sinks, retrieve, block)
        trained = setup.config.max_seq_len
        if size > trained:
            terms = "sinks + retrieve * retrieve_block + window + retrieve_block - 1"
            raise UserError(
                f"a query would attend to up to {size} positions ({terms}), "
                f"but the trained context has {trained}"
            )
        self.retrieve = retrieve
        self.block = block

    def new(self, model: Thinker, batch_size: int, max_len: int, slack: int = 0) -> KVCache:
        """As CacheFactory.new(). A text may be longer than `max_len`."""
        return RetrievalCache(model, batch_size, self.window, self.sinks, self.retrieve, self.block)

    def check_memory(self, model: Thinker, n_texts: int, max_len: int) -> None:
        """As CacheFactory.check_memory(), also for the stored blocks."""
        if n_texts > 1:
            stored = n_texts * self.stored_bytes(model.config, max_len)
            check_memory({"stored blocks": stored}, torch.device("cpu"), REMEDY)
        super().check_memory(model, n_texts, max_len)

    def _n_blocks(self, n_read: int) -> int:
        return n_stored_blocks(n_read, self.window, self.sinks, self.block)

    def n_evicted(self, n_read: int) -> int:
        """As CacheFactory.n_evicted()."""
        return self._n_blocks(n_read) * self.block

    def stored_bytes(self, config: ThinkerConfig, n_read: int) -> int:
        """As CacheFactory.stored_bytes()."""
        return stored_bytes(config, self._n_blocks(n_read), self.block)

    def describe_evicted(self, completions: list[Completion]) -> str:
        """As CacheFactory.describe_evicted()."""
        most = max(completion.n_evicted for completion in completions)
        if most == 0:
            return ""
        first, last = self.sinks + 1, self.sinks + most
        size = format_bytes(sum(completion.stored_bytes for completion in completions))
        used = f"each query retrieves up to {self.retrieve} blocks of {self.block}"
        return f"stored tokens {first} to {last} in {size}; {used}"


def make_caches(
    setup: Setup, retrieve: int = 0, retrieve_block: int = DEFAULT_BLOCK
) -> RetrievalCaches | None:
    """For the options `retrieve` and `retrieve_block`, positions per block.

    With `window`, each query also attends to the best `retrieve` blocks of evicted positions.
    Returns None for 0. Raises UserError if the options do not suit the model or other options.
    """
    check_types({"retrieve": int, "retrieve_block": int}, locals())
    if retrieve < 0 or (retrieve and setup.window is None):
        raise UserError(f"retrieve is {retrieve}; use at least 0, and only with a window")
    if retrieve:
        return RetrievalCaches(setup, setup.window, setup.sinks, retrieve, retrieve_block)
    if retrieve_block != DEFAULT_BLOCK:
        needed = "set retrieve to the number of blocks per query"
        raise UserError(f"retrieve_block is {retrieve_block}, but retrieve is 0; {needed}")
    return None
