"""Sources whose text is generated: tales, and random characters that repeat."""

import math
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from thinker.data.text.document import Document, Start
from thinker.data.text.sources import Source, SourceOptions, bounded_source

GENERATED_DOCUMENTS = 25_000  # default size; both sources are endless
REPEAT_ALPHABET = "".join(chr(c) for c in range(33, 127))
REPEAT_LENGTHS = range(16, 65)


def open_tales(name: str, options: SourceOptions) -> Source:
    """Stories of the built-in grammar."""
    from thinker.data.text import tales

    return _open(name, options, tales.generate_story, [tales.GRAMMAR_HASH])


def open_repeated(name: str, options: SourceOptions) -> Source:
    """Random characters, twice."""
    return _open(name, options, _repeat, [REPEAT_ALPHABET, list(REPEAT_LENGTHS)])


def _open(
    name: str, options: SourceOptions, story: Callable[[int, int], Any], content: list[Any]
) -> Source:
    """A source of max_documents texts. `story` makes a text from a seed and the number of the
    document."""
    n_documents = options.max_documents or GENERATED_DOCUMENTS
    return bounded_source(
        name,
        partial(_generate, story, options.seed, n_documents),
        [options.seed, n_documents, *content],
        options,
        bound=None,  # max_documents is the size of the source, of which nothing is left out
        n_documents=n_documents,
    )


def _generate(
    story: Callable[[int, int], Any], seed: int, count: int, start: Start
) -> Iterator[Document]:
    first, _ = start
    for index in range(first, count):
        made = story(seed, index)
        yield Document(made.text, made.log_prob)


def _repeat(seed: int, index: int) -> Document:
    """Generate n random printable characters twice, with n uniform over REPEAT_LENGTHS."""
    rng = random.Random(f"{seed}:{index}")
    n = rng.choice(REPEAT_LENGTHS)
    half = "".join(rng.choices(REPEAT_ALPHABET, k=n))
    log_prob = -math.log(len(REPEAT_LENGTHS)) - n * math.log(len(REPEAT_ALPHABET))
    return Document(half + half, log_prob)
