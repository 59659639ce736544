"""A vocabulary of made-up words, for benchmarks with models that are not trained."""

import random

from thinker.data.tokenizers.tokenizer import BOS_TOKEN, Tokenizer

LETTERS = "etaoinshrdlucmfwypvbgkjqxz"  # the most frequent first


def make_vocabulary(vocab_size: int) -> Tokenizer:
    """A tokenizer with the bytes, the marks of JSON, numbers and made-up words, as a trained one
    would have them."""
    rng = random.Random(0)
    pieces = dict.fromkeys([bytes([byte]) for byte in range(256)])
    marks = [
        '{"',
        '"}',
        '":',
        '": ',
        '", "',
        '",',
        '"]',
        "[]",
        '["',
        "},",
        "]}",
        "\n\n",
        "  ",
        "    ",
        ". ",
        ", ",
    ]
    pieces |= dict.fromkeys(mark.encode() for mark in marks)
    pieces |= dict.fromkeys(str(number).encode() for number in range(1000) if vocab_size > 5000)
    while len(pieces) < vocab_size - 1:
        n_letters = rng.randint(2, 9)
        word = "".join(rng.choices(LETTERS, weights=range(26, 0, -1), k=n_letters))
        space = rng.choice(["", " ", " "])
        word = rng.choice([word, word, word.title()])
        pieces[(space + word).encode()] = None
    return Tokenizer("bpe", [*pieces, None], {BOS_TOKEN: vocab_size - 1})
