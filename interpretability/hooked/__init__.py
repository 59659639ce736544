"""A Thinker with the interface of TransformerLens: its names, shapes and functions."""

from thinker.interpretability.hooked.hook_names import get_act_name
from thinker.interpretability.hooked.hooked_cache import HookedCache
from thinker.interpretability.hooked.hooked_model import HookedThinker

__all__ = ["HookedCache", "HookedThinker", "get_act_name"]
