"""Sources whose text is generated: tales, and random characters that repeat."""

import math
import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from thinker.data.text.document import Document, Start
from thinker.data.text.sources import Source, SourceOptions, bounded_source
from thinker.runtime.reading import sha256_of_file
from thinker.runtime.registry import import_offer

GRAMMAR_FILE = Path(__file__).with_name("tales.grammar")
GENERATED_DOCUMENTS = 25_000  # default size; both sources are endless
REPEAT_ALPHABET = "".join(chr(c) for c in range(33, 127))
REPEAT_LENGTHS = range(16, 65)


def open_tales(name: str, options: SourceOptions) -> Source:
    """Stories of the built-in grammar."""
    content = [sha256_of_file(GRAMMAR_FILE)]
    # The grammar is read only if stories are needed, not for tokens in the cache.
    return _open(name, options, "thinker.data.text.tales:generate_story", content)


def open_repeated(name: str, options: SourceOptions) -> Source:
    """Random characters, twice."""
    content = [REPEAT_ALPHABET, list(REPEAT_LENGTHS)]
    return _open(name, options, "thinker.data.text.generated_text:repeat", content)


def _open(name: str, options: SourceOptions, generate: str, content: list[Any]) -> Source:
    """A source of max_documents texts.

    generate: "module:name" of a function that makes a text from a seed and the number of the
    document.
    """
    n_documents = options.max_documents or GENERATED_DOCUMENTS
    return bounded_source(
        name,
        partial(_generate, generate, options.seed, n_documents),
        [options.seed, n_documents, *content],
        options,
        bound=None,  # max_documents is the size of the source, of which nothing is left out
        n_documents=n_documents,
    )


def _generate(generate: str, seed: int, count: int, start: Start) -> Iterator[Document]:
    make = import_offer(generate)
    first, _ = start
    for index in range(first, count):
        made = make(seed, index)
        yield Document(made.text, made.log_prob)


def repeat(seed: int, index: int) -> Document:
    """Generate n random printable characters twice, with n uniform over REPEAT_LENGTHS."""
    rng = random.Random(f"{seed}:{index}")
    n = rng.choice(REPEAT_LENGTHS)
    half = "".join(rng.choices(REPEAT_ALPHABET, k=n))
    log_prob = -math.log(len(REPEAT_LENGTHS)) - n * math.log(len(REPEAT_ALPHABET))
    return Document(half + half, log_prob)
