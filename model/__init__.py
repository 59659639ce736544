"""The Thinker: token ids (or embeddings) in, logits out."""

from model.cache import KVCache
from model.config import ThinkerConfig
from model.thinker import Thinker

__all__ = ["KVCache", "Thinker", "ThinkerConfig"]
