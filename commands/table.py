"""All commands of `thinker`, by group."""

from thinker.runtime.registry import Command, features

TRAIN = "Train"
USE = "Sample and serve"
UNDERSTAND = "Evaluate and understand"
CHANGE = "Change and export models"
LEARN = "Learn and set up"
GROUPS = (TRAIN, USE, UNDERSTAND, CHANGE, LEARN)

COMMANDS = {
    "train": Command(
        "thinker.training.command:main", "train a model from a config, or resume a run", TRAIN
    ),
    "configs": Command(
        "thinker.commands.configs_command:main", "list the configs, or copy one to edit", TRAIN
    ),
    "plan": Command(
        "thinker.commands.plan_command:main",
        "estimate memory, time and tokens of a run, and whether it fits",
        TRAIN,
    ),
    "data": Command(
        "thinker.commands.data_command:main", "show the training data of a config", TRAIN
    ),
    "generate": Command("thinker.generate:main", "write or score texts", USE),
    "chat": Command("thinker.commands.chat_command:main", "talk with a model", USE),
    "serve": Command(
        "thinker.serving.__main__:main", "answer requests over HTTP, as OpenAI's API does", USE
    ),
    "eval": Command(
        "thinker.commands.eval_command:main",
        "measure losses with intervals, long contexts, benchmark tasks",
        UNDERSTAND,
    ),
    "inspect": Command(
        "thinker.commands.inspect_command:main",
        "show attention, attributions, heads and what each layer predicts",
        UNDERSTAND,
    ),
    "patterns": Command(
        "thinker.commands.patterns_command:main", "plot attention patterns", UNDERSTAND
    ),
    "benchmark": Command(
        "thinker.benchmarks.command:main", "measure speed, memory and losses", UNDERSTAND
    ),
    "export hf": Command(
        "thinker.commands.export_hf_command:main",
        "write a Hugging Face folder, verified with transformers",
        CHANGE,
    ),
    "export gguf": Command(
        "thinker.commands.export_gguf_command:main",
        "write a file for llama.cpp and Ollama, verified",
        CHANGE,
    ),
    "lessons": Command(
        "thinker.commands.lessons_command:main", "list the lessons, copy or build them", LEARN
    ),
    "completion": Command(
        "thinker.commands.completion_command:main",
        "print what makes bash or zsh complete commands, flags and keys",
        LEARN,
    ),
}


def all_commands() -> dict[str, Command]:
    """The commands by name, those of features after the others of their group.

    A name has one word or, for commands that belong together, two.
    """
    commands = dict(COMMANDS)
    for feature in features():
        commands |= feature.commands
    ordered = {}
    for group in GROUPS:
        for name, command in commands.items():
            if command.group == group:
                ordered[name] = command
    return ordered
