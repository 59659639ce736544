"""model.size=auto: choose the model from the text and the training time."""

from thinker.runtime.registry import Feature

FEATURE = Feature(name="auto_size")
