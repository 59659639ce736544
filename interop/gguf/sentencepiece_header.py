"""The header of a GGUF file for a BPE of SentencePiece, as Llama 2, Phi-3 and Gemma have.

llama.cpp has scores instead of merges: it merges the pieces whose result has the highest score.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import islice
from typing import Any

from thinker.data.tokenizers.hf_tokenizer import HFTokenizer, pair_of
from thinker.data.tokenizers.tokenizer import Tokenizer, any_name
from thinker.interop.gguf.gguf_tokenizer import (
    BYTE,
    CONTROL,
    KEY,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    read_tokenizer,
    takes_spaces,
)
from thinker.interop.verify_export import adversarial_texts
from thinker.runtime.errors import UserError

SPACE = "▁"
N_TEXTS = 500
REASON = "cannot export the tokenizer to GGUF"
# Spaces that the library takes behind a token, and llama.cpp does not.
WIDE_SPACES = r"[\t-\r ]*[\x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]"

Pair = tuple[str, ...]


def sentencepiece_header(tokenizer: HFTokenizer, vocab_size: int, name: str) -> dict[str, Any]:
    """Fields of the header that describe the tokenizer of a model called `name`.

    Raises UserError if llama.cpp would tokenize differently.
    """
    _check_steps(tokenizer.content)
    tokens = _tokens(tokenizer, vocab_size)
    merges = [pair_of(merge) for merge in tokenizer.content["model"]["merges"]]
    pieces = {text for text, kind in tokens if kind == NORMAL}
    _check_pairs(pieces, set(tokenizer.special_tokens), set(merges))
    _check_order(pieces, merges)
    ranks: dict[str, int] = {}
    for rank, pair in enumerate(merges):
        ranks.setdefault("".join(pair), rank)
    header = {
        "tokenizer_model": "llama",
        "tokenizer_pre": "default",
        "token_list": [text for text, _ in tokens],
        "token_types": [kind for _, kind in tokens],
        "token_scores": [-float(ranks.get(text, 0)) for text, _ in tokens],
        "add_space_prefix": tokenizer.decode_bytes(tokenizer.encode("a")).startswith(b" "),
    }
    if UNKNOWN in header["token_types"]:
        header["unk_token_id"] = header["token_types"].index(UNKNOWN)
    _compare(tokenizer, header, name)
    return header


def _tokens(tokenizer: HFTokenizer, vocab_size: int) -> list[tuple[str, int]]:
    """The text of each id, and its type."""
    model = tokenizer.content["model"]
    names = {number: name for name, number in tokenizer.special_tokens.items()}
    texts = {number: piece for piece, number in model["vocab"].items()}
    tokens = []
    for number in range(vocab_size):
        text = names.get(number, texts.get(number))
        if text is not None and "\0" in text:  # llama.cpp would stop at it
            raise UserError(f"{REASON}; llama.cpp cannot read its token {text!r}")
        if text is None:
            tokens.append((f"[unused {number}]", UNUSED))
        elif number in names:
            tokens.append((text, _type_of_added(tokenizer, text)))
        elif re.fullmatch("<0x[0-9A-F]{2}>", text):
            tokens.append((text, BYTE))
        else:
            tokens.append((text, NORMAL))
    return tokens


def _type_of_added(tokenizer: HFTokenizer, name: str) -> int:
    if name in tokenizer.non_special_added_tokens:
        # Gemma's runs of spaces come from merges, too. Others would be shown as ▁.
        if set(name) == {SPACE}:
            return NORMAL
        return USER_DEFINED
    if name == tokenizer.content["model"].get("unk_token"):
        return UNKNOWN
    return CONTROL


def _steps(step: dict[str, Any] | None, key: str) -> list[dict[str, Any]]:
    """The steps of a normalizer or pre-tokenizer, one after the other."""
    if step is None:
        return []
    if step.get("type") != "Sequence":
        return [step]
    steps = []
    for inner in step[key]:
        steps += _steps(inner, key)
    return steps


def _check_steps(content: dict[str, Any]) -> None:
    """Raise UserError for a model or a step that llama.cpp does not have."""
    model = content["model"]
    if model["type"] != "BPE" or model.get("ignore_merges"):
        raise UserError(f"{REASON}; it is no BPE of which all tokens are made by merges")
    steps = _steps(content.get("normalizer"), "normalizers")
    steps += _steps(content.get("pre_tokenizer"), "pretokenizers")
    for step in steps:
        kind = step.get("type")
        is_known = kind == "Prepend" and step["prepend"] == SPACE
        is_known |= kind == "Replace" and step["content"] == SPACE
        # Without effect, because no spaces are left.
        is_known |= kind == "Split" and step["pattern"].get("String") == " "
        if not is_known:
            raise UserError(f"{REASON}; llama.cpp does not have its step {kind}")


def _check_pairs(pieces: set[str], whole: set[str], pairs: set[Pair]) -> None:
    """Raise UserError if llama.cpp would merge two pieces that the tokenizer does not.

    It merges any two whose result is a token. whole: tokens that no merge makes or uses.
    """

    def is_part(text: str) -> bool:
        return text in pieces or (len(text) == 1 and text not in whole)

    for piece in pieces:
        for place in range(1, len(piece)):
            pair = piece[:place], piece[place:]
            if pair not in pairs and is_part(pair[0]) and is_part(pair[1]):
                raise UserError(
                    f"{REASON}; llama.cpp would merge {pair[0]!r} and {pair[1]!r}, for which "
                    "tokenizer.json has no merge"
                )


def _check_order(pieces: set[str], merges: Iterable[Pair]) -> None:
    """Raise UserError if scores cannot express the order of merges: those with one result must
    follow each other. Runs of one character become the longest token in any case."""
    done = set()
    last = ""
    for pair in merges:
        result = "".join(pair)
        if result != last and result in done and len(set(result)) > 1 and result in pieces:
            raise UserError(f"{REASON}; llama.cpp has no such order of the merges to {result!r}")
        done.add(result)
        last = result


def has_equal_ids(tokenizer: Tokenizer, text: str) -> bool:
    """Whether llama.cpp can tokenize a text as the tokenizer does.

    Not with a character 0, which ends a text there; not with a space outside ASCII behind a token
    that takes the spaces behind it; not where ▁▁, written as such, is a token and follows a space.
    """
    if "\0" in text:
        return False
    if not isinstance(tokenizer, HFTokenizer):
        return True
    if SPACE * 2 in tokenizer.special_tokens and re.search("▁▁ | ▁▁", text):
        return False
    taking = [name for name, flags in tokenizer.flags.items() if flags["rstrip"]]
    if not taking:
        return True
    return re.search(f"(?:{any_name(taking).pattern}){WIDE_SPACES}", text) is None


def _compare(tokenizer: HFTokenizer, header: dict[str, Any], name: str) -> None:
    """Read the header as llama.cpp does, and compare ids. Raises UserError if they differ."""
    fields = {
        "general.name": name,
        KEY + "model": header["tokenizer_model"],
        KEY + "tokens": header["token_list"],
        KEY + "token_type": header["token_types"],
        KEY + "scores": header["token_scores"],
        KEY + "add_space_prefix": header["add_space_prefix"],
        KEY + "bos_token_id": tokenizer.bos_id,
        KEY + "eos_token_id": tokenizer.eos_id,
    }
    again = read_tokenizer(fields, len(header["token_list"]))
    for text in islice(adversarial_texts(list(tokenizer.special_tokens)), N_TEXTS):
        if not has_equal_ids(tokenizer, text):
            continue
        if again.encode(text, allow_special=True) != tokenizer.encode(text, allow_special=True):
            raise UserError(f"{REASON}; llama.cpp would tokenize {text!r} otherwise")


def named_for_spaces(tokenizer: Tokenizer, name: str) -> str:
    """The name of a model with which llama.cpp takes the spaces behind special tokens, or not.

    It does so for the tokens of Phi-3, which it knows by the name.
    """
    flags = []
    if isinstance(tokenizer, HFTokenizer):
        flags = list(tokenizer.flags.values())
    if not any(flag["rstrip"] for flag in flags):
        return re.sub("(?i)phi-?3", "phi 3", name)
    if takes_spaces(name):
        return name
    return f"phi-3 {name}"
