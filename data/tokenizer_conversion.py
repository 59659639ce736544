"""A tokenizer as Hugging Face's files, tokenizer.json and tokenizer_config.json, both ways.

Byte-level BPE becomes a tiktoken encoding where that gives the same ids for every text, which is shown in two steps:

1. The merges. tiktoken merges whatever pair makes the token of the lowest id; Hugging Face follows a list. Both agree
   if the list makes tokens in the order of their ids, and each token's bytes, merged by lower ids alone, come down to
   two parts that the list has as a pair. (Until a token is made, merges inside its bytes happen as they would alone, so
   no other two parts of it can ever lie side by side.)
2. What cuts the text, a regular expression read by another library: compared on texts that are hard to cut.

Anything else is run through the library `tokenizers` itself.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from thinker.data.hf_tokenizer import (
    ADD_BOS_KEY,
    BOS_KEY,
    CONFIG_NAME,
    EOS_KEY,
    FILE_NAME,
    SPECIAL,
    TEMPLATE_NAME,
    TO_BYTE,
    TO_CHAR,
    Files,
    HFTokenizer,
    replace_text,
    write_json,
)  # fmt: skip
from thinker.data.tokenizer import MAX_FILE_BYTES, ONE_CHARACTER, PROBE, Tokenizer
from thinker.runtime.errors import UserError

POSSESSIVE = r"(\{\d*,?\d*\})\+"  # tiktoken's library takes such a count and gives nothing back, theirs repeats it
# What ByteLevel cuts by, unless it is told not to; and after Digits has cut off every digit.
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
GPT2_DIGITS = r"\p{N}|'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?![^\s\p{N}])|\s+"
HARD = [  # texts
    PROBE,
    "I'll  we'Ve '\u017f\u00a0 it's12345678 90,5\t\r\n\r\n   x \n  \u3000y\u0085z...\n\n\n!?  \n",
    "\ufb01 \u0130 \u2177\u00b2 \u0663\u0664 \u0531\u0552 \u0e52\u0e53 \u01c5 \u0301a\u0301 \u00bd 1\u00bd",
    "\ufeff\u200b x\0\x1f\x7f  def f(x):\n\treturn x**2  # \u00e9t\u00e9\n\n",
    "🙂👩\u200d👩\u200d👧🇫🇷 한국어 हिन्दी ไทย",
]


def read_files(folder: Path) -> Files:
    """The files of a folder. Raises UserError where they are missing, broken, or say too little.

    What ends a text is what generation_config.json says, or else config.json, or else the tokenizer's own file.
    """
    tokenizer = _read_json(folder / FILE_NAME)
    config, *of_model = (
        _read_json(folder / name, missing={}) for name in (CONFIG_NAME, "generation_config.json", "config.json")
    )
    template = config.get("chat_template")
    if (folder / TEMPLATE_NAME).is_file():
        try:
            template = (folder / TEMPLATE_NAME).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{folder / TEMPLATE_NAME} cannot be read: {error}") from error
    eos, bos_id = config.pop(EOS_KEY, None), config.pop(BOS_KEY, None)
    for said in of_model:
        eos = said.get("eos_token_id") if eos is None else eos
        bos_id = said.get("bos_token_id") if bos_id is None else bos_id
    try:
        if isinstance(template, list):  # several, by name
            template = next((each.get("template") for each in template if each.get("name") == "default"), None)
        ends = [eos] if isinstance(eos, int) else list(eos or [])
        return Files(tokenizer, config, template, ends, bos_id, _told(folder, config))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = error if isinstance(error, ValueError) else f"it has no {error}"
        raise UserError(f"{folder / FILE_NAME} cannot be used: {reason}") from error


def _told(folder: Path, config: dict) -> list[Any]:
    """The tokens, names or dictionaries, that transformers adds to those of tokenizer.json where it lacks them."""
    listed: list[Any] = []
    if "added_tokens_decoder" in config:
        listed += config["added_tokens_decoder"].values()
    else:  # older files, which it reads then
        config = config | _read_json(folder / "special_tokens_map.json", missing={})
        listed += _read_json(folder / "added_tokens.json", missing={})
    names = [config.get(name) for name in SPECIAL]
    for name in ("extra_special_tokens", "additional_special_tokens"):
        several = config.get(name) or []
        names += several.values() if isinstance(several, dict) else several
    return listed + [each["content"] if isinstance(each, dict) else each for each in names if each is not None]


def read(folder: Path) -> Tokenizer:
    """The tokenizer of a Hugging Face folder: by tiktoken where that is proved equal, through `tokenizers` elsewhere.

    Raises UserError where the files are missing or broken, or hold something that cannot be run.
    """
    files = read_files(folder)
    try:
        foreign = HFTokenizer(files)
        ours = as_tiktoken(files)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{folder / FILE_NAME} cannot be used: {error}") from error
    try:
        alike = ours is not None and all(ours.encode(t, s) == foreign.encode(t, s) for t in HARD for s in (False, True))
    except UserError:  # a pattern that tiktoken's library cannot run
        alike = False
    return ours if alike else foreign


def as_tiktoken(files: Files) -> Tokenizer | None:
    """The same as a tiktoken encoding, None where step 1 above fails, or something has no counterpart there."""
    content = files.tokenizer
    model, normalizer = content["model"], (content.get("normalizer") or {}).get("type")
    pattern = _pattern(content.get("pre_tokenizer"))
    odd = [model.get(name) for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")]
    plain = model.get("type") == "BPE" and not any(odd) and (content.get("decoder") or {}).get("type") == "ByteLevel"
    if not plain or pattern is None or files.bendable or normalizer not in (None, "NFC"):
        return None
    if files.normalized == {True, False} or (normalizer and files.normalized == {True}):
        return None
    special = set(files.added.values())
    pieces = {piece: number for piece, number in model["vocab"].items() if number not in special}
    if not all(set(piece) <= TO_BYTE.keys() for piece in pieces):
        return None
    ranks = {bytes(TO_BYTE[char] for char in piece): number for piece, number in pieces.items()}
    if len(ranks) < len(pieces) or any(bytes([b]) not in ranks for b in range(256)):
        return None
    if not _same_merges(model, ranks):
        return None
    tokens: list[bytes | None] = [None] * (1 + max([*ranks.values(), *special]))
    for token, number in ranks.items():
        tokens[number] = token
    options = {
        "eos": files.eos_ids,
        "add_bos": bool(files.bos_prefix),
        "non_special_added_tokens": files.non_special_added_tokens,
    }
    options |= {"normalizer": normalizer, "chat_template": files.chat_template, "named": files.named}
    try:
        return Tokenizer("hf", tokens, files.added, files.bos_token, pattern, **options)
    except ValueError:  # a pattern that tiktoken's library does not read, or two names for one token
        return None


def _same_merges(model: dict, ranks: dict[bytes, int]) -> bool:
    """Step 1."""
    pairs: dict[int, set[tuple[bytes, bytes]]] = {}
    newest = -1
    for merge in model["merges"]:
        first, second = merge.split(" ") if isinstance(merge, str) else merge
        if not set(first + second) <= TO_BYTE.keys():
            return False
        parts = tuple(bytes(TO_BYTE[char] for char in part) for part in (first, second))
        number = ranks.get(parts[0] + parts[1])
        if number is None or number < newest or any(part not in ranks for part in parts):
            return False
        newest = number
        pairs.setdefault(number, set()).add(parts)
    for token, number in ranks.items():
        parts = tuple(split(token, ranks, number)) if len(token) > 1 else ()
        if number in pairs:
            if parts not in pairs[number]:
                return False
        elif len(token) > 1 and (len(parts) == 2 or not model.get("ignore_merges")):
            return False
    return True


def split(token: bytes, ranks: dict[bytes, int], below: int) -> list[bytes]:
    """What the bytes of a token come down to when pairs are merged whose token has a rank below `below`."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 1:
        found = [ranks.get(parts[i] + parts[i + 1], below) for i in range(len(parts) - 1)]
        best = min(found)
        if best >= below:
            break
        at = found.index(best)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts


def _pattern(pre_tokenizer: dict | None) -> str | None:
    """The one regular expression that cuts as a pre-tokenizer does, if it is of a known form."""
    steps = pre_tokenizer or {}
    steps = steps["pretokenizers"] if steps.get("type") == "Sequence" else [steps]
    kinds = [step.get("type") for step in steps]
    if kinds[-1:] != ["ByteLevel"] or steps[-1].get("add_prefix_space"):
        return None
    cuts = steps[-1].get("use_regex", True)
    if kinds == ["ByteLevel"]:
        return GPT2 if cuts else None
    if kinds == ["Digits", "ByteLevel"] and cuts and steps[0].get("individual_digits"):
        return GPT2_DIGITS
    if kinds == ["Split", "ByteLevel"] and not cuts and not steps[0].get("invert"):
        regex = steps[0]["pattern"].get("Regex") if steps[0].get("behavior") == "Isolated" else None
        return None if regex is None or re.search(POSSESSIVE, regex) else regex
    return None


def write(tokenizer: Tokenizer, folder: str | Path, max_length: int) -> None:
    """Write tokenizer.json and tokenizer_config.json (and a chat template) that AutoTokenizer reads, into a folder.

    `AutoTokenizer(text)` gives tokenizer.encode(text, allow_special=True), without a BOS token in front. Possessive
    counts, `{1,3}+`, mean something else to the library that cuts there, and are written without the +.
    """
    folder = Path(folder)
    if isinstance(tokenizer, HFTokenizer):
        tokenizer.save(folder)
        return
    pieces = enumerate(tokenizer._tokens)
    vocab = {_printed(token): number for number, token in pieces if token is not None}
    special = sorted(tokenizer.special_tokens.items(), key=lambda item: item[1])
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [
        {"id": number, "content": name, **flags, "special": name not in tokenizer.non_special_added_tokens}
        for name, number in special
    ]
    pattern = r"[\s\S]" if tokenizer.pattern == ONE_CHARACTER else tokenizer.pattern
    pattern = {"Regex": re.sub(POSSESSIVE, r"\1", pattern)}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    cut = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
    model = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None}
    model |= {"end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": True}
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": tokenizer.normalizer and {"type": tokenizer.normalizer},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [cut, byte_level]},
        "post_processor": None,
        "decoder": byte_level | {"use_regex": True},
        "model": model | {"vocab": vocab | dict(special), "merges": merges_of(tokenizer)},
    }
    eos = tokenizer.named.get("eos_token")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokenizer.named.get("bos_token"),
        "eos_token": eos,
        "pad_token": tokenizer.named.get("pad_token", eos),
        ADD_BOS_KEY: bool(tokenizer.bos_prefix),
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
    }
    write_json(folder / FILE_NAME, content)
    write_json(folder / CONFIG_NAME, config)
    if tokenizer.chat_template is not None:
        replace_text(folder / TEMPLATE_NAME, tokenizer.chat_template)


def merges_of(tokenizer: Tokenizer) -> list[list[str]]:
    """The pairs that make the tokens, in order, in printable characters."""
    ranks = {token: number for number, token in enumerate(tokenizer._tokens) if token is not None}
    pairs = (split(token, ranks, number) for token, number in sorted(ranks.items(), key=lambda item: item[1]))
    return [[_printed(part) for part in parts] for parts in pairs if len(parts) == 2]


def _printed(token: bytes) -> str:
    return "".join(map(TO_CHAR.get, token))


def _read_json(path: Path, missing: dict | None = None) -> dict:
    """What a file holds, or `missing` where there is none. Raises UserError."""
    if missing is not None and not path.exists():
        return missing
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ValueError("it is larger than any tokenizer")
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} is not a JSON object")
    return content
