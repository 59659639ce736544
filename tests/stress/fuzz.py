"""Coverage-guided fuzzing of what reads strangers' files: python fuzz.py TARGET FOLDER [options of
libFuzzer].

Half of the inputs are mutated as bytes, by libFuzzer; in the other half one value, key or branch is
replaced, so that what reads them gets further. Anything but an error for the user, a hang or an
abort ends it with a stack trace.
"""

import contextlib
import json
import random
import sys
from pathlib import Path

import atheris

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]
with atheris.instrument_imports(
    include=["thinker.data", "thinker.runtime", "thinker.interop", "thinker.training"]
):
    from test_malicious_files import distort

    from thinker.data.chat import chat, chat_template
    from thinker.data.corpus.corpus_index import read_index
    from thinker.data.corpus.shards import Shard
    from thinker.data.text.tables.jsonl import read_rows
    from thinker.data.tokenizers import tokenizer_conversion
    from thinker.data.tokenizers.saved_tokenizer import load_tokenizer
    from thinker.data.tokenizers.tokenizer_factory import make_tokenizer
    from thinker.interop.hf_config import from_hf_config
    from thinker.runtime.errors import RunError, UserError
    from thinker.runtime.reading import read_json
    from thinker.runtime.yaml_files import read_yaml
    from thinker.training.config.load import load_config, validate_config

TALK = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
chat_template.CPU_SECONDS = 1


def read_template(path):
    tokenizer = make_tokenizer("byte", [])
    with contextlib.suppress(UnicodeDecodeError):
        tokenizer = tokenizer.with_chat_template(path.read_text())
        return chat.encode(tokenizer, chat.Conversation(TALK))


def read_tokenizer(path):
    return tokenizer_conversion.read(path.parent).encode("A cat's 2\n")


def read_config(path):
    return validate_config(read_yaml(path)) if path.stat().st_size % 2 else load_config(path, [])


# Where each target's input is written, and what reads it.
TARGETS = {
    "config.json": ("config.json", lambda path: from_hf_config(read_json(path))),
    "tokenizer.json": ("tokenizer.json", read_tokenizer),
    "config.yaml": ("config.yaml", read_config),
    "template": ("chat_template.jinja", read_template),
    "shard": ("train-00000.tokens", lambda path: Shard.open(path, load_tokenizer(path.parent))),
    "corpus.json": ("corpus.json", lambda path: read_index(path.parent)),
    "rows": ("rows.jsonl", lambda path: list(read_rows(str(path)))),
}


def mutate(data, max_size, seed):
    rng = random.Random(seed)
    try:
        changed = (
            json.dumps(distort(json.loads(data), rng)).encode() if rng.random() < 0.5 else None
        )
    except (ValueError, RecursionError):
        changed = None
    return atheris.Mutate(data, max_size) if changed is None or len(changed) > max_size else changed


def main():
    name, read = TARGETS[sys.argv[1]]
    path = Path(sys.argv[2]) / name

    def test_one(data):
        path.write_bytes(data)
        with contextlib.suppress(
            UserError, RunError, ValueError if name == "rows.jsonl" else UserError
        ):
            read(path)

    atheris.Setup([sys.argv[0], *sys.argv[3:]], test_one, custom_mutator=mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
