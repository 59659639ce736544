"""Early exit: skip later layers for tokens that are already certain."""

from thinker.runtime.registry import Feature

FEATURE = Feature(name="early_exit")
