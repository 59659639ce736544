"""Early exit: skip later layers for tokens that are already certain."""

from thinker.runtime.registry import Command, Feature

FEATURE = Feature(
    name="early_exit",
    generator_options=("early_exit",),
    decoder="thinker.features.early_exit.decoder:make_decoder",
    commands={
        "early-exit": Command(
            "thinker.features.early_exit.command:main",
            "measure what skipping later layers saves and changes",
            "Evaluate and understand",
        )
    },
    arguments={"generate": "thinker.features.early_exit.flags:EarlyExitFlags"},
)
