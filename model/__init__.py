"""The model: token ids (or embeddings) in, logits out."""

from thinker.model.config import ThinkerConfig
from thinker.model.kv_cache import KVCache
from thinker.model.transformer import Thinker

__all__ = ["KVCache", "Thinker", "ThinkerConfig"]
