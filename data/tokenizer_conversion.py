"""Conversion between our tokenizers and Hugging Face's tokenizer.json and tokenizer_config.json, both ways.

A byte-level BPE becomes a tiktoken encoding, which is five times as fast (docs/experiments.md), if that gives the same
ids for every text. This is verified in two steps:

1. The merges. tiktoken merges the pair whose token has the lowest id; Hugging Face follows a list. The two agree if the
   list makes tokens in the order of their ids, and if each token's bytes, merged by lower ids alone, end as two parts
   that are a pair of the list. (Until a token is made, merges inside its bytes happen as they would alone, so no other
   two parts of it can ever be adjacent.)
2. The regular expression that splits text, read by another library: compared on texts that are hard to split.

Every other tokenizer is run by the library `tokenizers` itself.
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
    HFTokenizer,
    TokenizerFiles,
    write_json,
)  # fmt: skip
from thinker.data.tokenizer import MAX_FILE_BYTES, ONE_CHARACTER, PROBE, Tokenizer
from thinker.runtime.errors import UserError
from thinker.runtime.files import atomic_write

POSSESSIVE = r"(\{\d*,?\d*\})\+"  # possessive for tiktoken, a repeated group for `tokenizers`
# How ByteLevel splits text by default; and how it does after Digits has split off every digit.
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
GPT2_DIGITS = r"\p{N}|'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?![^\s\p{N}])|\s+"
HARD_TEXTS = [
    PROBE,
    "I'll  we'Ve '\u017f\u00a0 it's12345678 90,5\t\r\n\r\n   x \n  \u3000y\u0085z...\n\n\n!?  \n",
    "\ufb01 \u0130 \u2177\u00b2 \u0663\u0664 \u0531\u0552 \u0e52\u0e53 \u01c5 \u0301a\u0301 \u00bd 1\u00bd",
    "\ufeff\u200b x\0\x1f\x7f  def f(x):\n\treturn x**2  # \u00e9t\u00e9\n\n",
    "🙂👩\u200d👩\u200d👧🇫🇷 한국어 हिन्दी ไทย",
]


def read_files(folder: Path) -> TokenizerFiles:
    """Read the files of a folder. Raises UserError where they are missing, broken or incomplete.

    The EOS tokens are those of generation_config.json, else of config.json, else of tokenizer_config.json.
    """
    tokenizer = _read_json(folder / FILE_NAME)
    config, *model_configs = (
        _read_json(folder / name, missing={}) for name in (CONFIG_NAME, "generation_config.json", "config.json")
    )
    template = config.get("chat_template")
    if (folder / TEMPLATE_NAME).is_file():
        try:
            template = (folder / TEMPLATE_NAME).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{folder / TEMPLATE_NAME} cannot be read: {error}") from error
    eos, bos_id = config.pop(EOS_KEY, None), config.pop(BOS_KEY, None)
    for model_config in model_configs:
        eos = model_config.get("eos_token_id") if eos is None else eos
        bos_id = model_config.get("bos_token_id") if bos_id is None else bos_id
    try:
        if isinstance(template, list):  # named templates
            template = next((x.get("template") for x in template if x.get("name") == "default"), None)
        eos_ids = [eos] if isinstance(eos, int) else list(eos or [])
        return TokenizerFiles(tokenizer, config, template, eos_ids, bos_id, _tokens_elsewhere(folder, config))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = error if isinstance(error, ValueError) else f"it has no {error}"
        raise UserError(f"{folder / FILE_NAME} cannot be used: {reason}") from error


def _tokens_elsewhere(folder: Path, config: dict) -> list[Any]:
    """The tokens, as names or dictionaries, that transformers adds to those of tokenizer.json."""
    if "added_tokens_decoder" in config:
        declared = [*config["added_tokens_decoder"].values()]
    else:  # the format before that key
        config = config | _read_json(folder / "special_tokens_map.json", missing={})
        declared = [*_read_json(folder / "added_tokens.json", missing={})]
    names = [config.get(name) for name in SPECIAL]
    for name in ("extra_special_tokens", "additional_special_tokens"):
        extra = config.get(name) or []
        names += extra.values() if isinstance(extra, dict) else extra
    return declared + [name["content"] if isinstance(name, dict) else name for name in names if name is not None]


def read(folder: Path) -> Tokenizer:
    """Read the tokenizer of a Hugging Face folder: as a tiktoken encoding if that is equal, else as an HFTokenizer.

    Raises UserError if the files are missing, broken, or ask for something that is not supported.
    """
    files = read_files(folder)
    try:
        hf_tokenizer = HFTokenizer(files)
        by_tiktoken = as_tiktoken(files)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{folder / FILE_NAME} cannot be used: {error}") from error
    if by_tiktoken is None:
        return hf_tokenizer
    try:
        for text in HARD_TEXTS:
            for allow_special in (False, True):
                if by_tiktoken.encode(text, allow_special) != hf_tokenizer.encode(text, allow_special):
                    return hf_tokenizer
    except UserError:  # tiktoken cannot run the pattern
        return hf_tokenizer
    return by_tiktoken


def as_tiktoken(files: TokenizerFiles) -> Tokenizer | None:
    """The tokenizer as a tiktoken encoding; None if step 1 above fails, or if a setting has no equivalent there."""
    content = files.tokenizer
    model, normalizer = content["model"], (content.get("normalizer") or {}).get("type")
    pattern = _pattern(content.get("pre_tokenizer"))
    unsupported = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")
    is_byte_level = (content.get("decoder") or {}).get("type") == "ByteLevel"
    if model.get("type") != "BPE" or any(model.get(name) for name in unsupported) or not is_byte_level:
        return None
    if pattern is None or files.matches_flexibly or normalizer not in (None, "NFC"):
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
        "eos_ids": files.eos_ids,
        "add_bos": bool(files.bos_prefix),
        "non_special_added_tokens": files.non_special_added_tokens,
        "normalizer": normalizer,
        "chat_template": files.chat_template,
        "special_tokens_map": files.special_tokens_map,
    }
    try:
        return Tokenizer("hf", tokens, files.added, files.bos_token, pattern, **options)
    except ValueError:  # tiktoken cannot read the pattern, or two names share a token
        return None


def _same_merges(model: dict, ranks: dict[bytes, int]) -> bool:
    """Whether tiktoken merges as the list of merges says: step 1 above."""
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
    """The parts that remain when the bytes of a token are merged into tokens of a rank lower than `below`."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 1:
        pair_ranks = [ranks.get(parts[i] + parts[i + 1], below) for i in range(len(parts) - 1)]
        best = min(pair_ranks)
        if best >= below:
            break
        i = pair_ranks.index(best)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return parts


def _pattern(pre_tokenizer: dict | None) -> str | None:
    """The regular expression that splits text as a pre-tokenizer does, or None if its form is not known."""
    steps = pre_tokenizer or {}
    steps = steps["pretokenizers"] if steps.get("type") == "Sequence" else [steps]
    kinds = [step.get("type") for step in steps]
    if kinds[-1:] != ["ByteLevel"] or steps[-1].get("add_prefix_space"):
        return None
    uses_regex = steps[-1].get("use_regex", True)
    if kinds == ["ByteLevel"]:
        return GPT2 if uses_regex else None
    if kinds == ["Digits", "ByteLevel"] and uses_regex and steps[0].get("individual_digits"):
        return GPT2_DIGITS
    if kinds == ["Split", "ByteLevel"] and not uses_regex and not steps[0].get("invert"):
        regex = steps[0]["pattern"].get("Regex") if steps[0].get("behavior") == "Isolated" else None
        return None if regex is None or re.search(POSSESSIVE, regex) else regex
    return None


def write(tokenizer: Tokenizer, folder: str | Path, max_length: int) -> None:
    """Write tokenizer.json, tokenizer_config.json and the chat template into a folder, as AutoTokenizer reads them.

    `AutoTokenizer(text)` gives tokenizer.encode(text, allow_special=True), without a BOS token in front. Possessive
    counts, `{1,3}+`, are written without the +: the library `tokenizers` would read them as repeated groups.
    """
    folder = Path(folder)
    if isinstance(tokenizer, HFTokenizer):
        tokenizer.save(folder)
        return
    vocab = {_printed(token): number for number, token in enumerate(tokenizer._tokens) if token is not None}
    special = sorted(tokenizer.special_tokens.items(), key=lambda item: item[1])
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [
        {"id": number, "content": name, **flags, "special": name not in tokenizer.non_special_added_tokens}
        for name, number in special
    ]
    pattern = r"[\s\S]" if tokenizer.pattern == ONE_CHARACTER else tokenizer.pattern
    pattern = {"Regex": re.sub(POSSESSIVE, r"\1", pattern)}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    split_step = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
    model = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None}
    model |= {"end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": True}
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": tokenizer.normalizer and {"type": tokenizer.normalizer},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split_step, byte_level]},
        "post_processor": None,
        "decoder": byte_level | {"use_regex": True},
        "model": model | {"vocab": vocab | dict(special), "merges": merges_of(tokenizer)},
    }
    eos = tokenizer.special_tokens_map.get("eos_token")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokenizer.special_tokens_map.get("bos_token"),
        "eos_token": eos,
        "pad_token": tokenizer.special_tokens_map.get("pad_token", eos),
        ADD_BOS_KEY: bool(tokenizer.bos_prefix),
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
    }
    write_json(folder / FILE_NAME, content)
    write_json(folder / CONFIG_NAME, config)
    if tokenizer.chat_template is not None:
        atomic_write(folder / TEMPLATE_NAME, tokenizer.chat_template)


def merges_of(tokenizer: Tokenizer) -> list[list[str]]:
    """The pairs of parts that make the tokens, in order, in printable characters."""
    ranks = {token: number for number, token in enumerate(tokenizer._tokens) if token is not None}
    pairs = (split(token, ranks, number) for token, number in sorted(ranks.items(), key=lambda item: item[1]))
    return [[_printed(part) for part in parts] for parts in pairs if len(parts) == 2]


def _printed(token: bytes) -> str:
    return "".join(map(TO_CHAR.get, token))


def _read_json(path: Path, missing: dict | None = None) -> dict:
    """The content of a JSON file, or `missing` if the file does not exist. Raises UserError."""
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
