"""The command `thinker chat`: talk with a model, as generate.py does with --chat --interactive."""

from thinker import generate
from thinker.generation.command_flags import add_feature_flags
from thinker.runtime.cli import ArgumentParser

EXAMPLES = ("runs/finetune", 'runs/finetune --system "Answer in one sentence." --temperature 0.5')
# The flags of generate.py that a chat does not have, with their values.
MODE = {"chat": True, "interactive": True}
UNUSED = {"num_samples": 1, "score": None, "logprobs": None, "json": False}


def main() -> int:
    """Talk until the user leaves. Returns the exit status."""
    description = "Talk with a model, turn by turn. It needs a chat template, as chats have taught."
    parser = ArgumentParser(description=description, examples=EXAMPLES)
    parser.add_model("path", "PATH")
    generate.add_prompt_flags(parser)
    generate.add_sampling_flags(parser)
    generate.add_performance_flags(parser)
    generate.add_conversation_flag(parser)
    parser.set_defaults(**MODE, **UNUSED)
    return generate.run(parser, add_feature_flags(parser, "generate"))
