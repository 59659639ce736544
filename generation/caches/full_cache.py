"""The usual caches: all keys and values, in the dtype of the model."""

from thinker.generation.sequence import Completion
from thinker.model import KVCache, Thinker, ThinkerConfig
from thinker.runtime.memory import check_memory

REMEDY = "reduce the number of samples or max_new_tokens"


class FullCaches:
    """Makes caches that keep what the model's attention reads (see CacheFactory)."""

    option = ""
    bits: int | None = None
    can_roll_back = True
    is_unbounded = False
    is_observable = True

    def new(self, model: Thinker, batch_size: int, max_len: int, slack: int = 0) -> KVCache:
        """As CacheFactory.new()."""
        return model.new_cache(batch_size, max_len, slack)

    def check_memory(self, model: Thinker, n_texts: int, max_len: int) -> None:
        """As CacheFactory.check_memory(). One text allocates on demand."""
        if n_texts > 1:
            needed = n_texts * self.bytes_per_text(model, max_len)
            check_memory({"cache": needed}, model.device, REMEDY)

    def bytes_per_text(self, model: Thinker, max_len: int) -> int:
        """Memory of the cache of one text, on the device of the model."""
        return KVCache(model.config, 1, max_len, "meta", model.dtype).nbytes

    def n_evicted(self, n_read: int) -> int:
        """No position leaves the cache."""
        return 0

    def stored_bytes(self, config: ThinkerConfig, n_read: int) -> int:
        """Nothing is stored elsewhere."""
        return 0

    def describe_evicted(self, completions: list[Completion]) -> str:
        """Nothing to describe."""
        return ""
