"""Early exit: skip later layers for tokens that are already certain."""

from thinker.runtime.registry import Feature

FEATURE = Feature(
    name="early_exit",
    generator_options=("early_exit",),
    decoder="thinker.features.early_exit.decoder:make_decoder",
    commands={"early_exit": "thinker.features.early_exit.command:main"},
    arguments={"generate": "thinker.features.early_exit.flags:EarlyExitFlags"},
)
