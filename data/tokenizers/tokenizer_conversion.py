"""Conversion from and to Hugging Face's tokenizer.json and tokenizer_config.json.

A byte-level BPE becomes a tiktoken encoding, which is five times as fast (docs/benchmarks/data.md), if it produces the same
ids for every text. This is verified in two steps:

1. The merges. tiktoken merges the pair whose token has the lowest id; Hugging Face follows a list. The two agree if the
   list creates tokens in the order of their ids, and if merging each token's bytes with only lower ids leaves two parts
   that are a pair of the list. (Until a token is created, merges inside its bytes do not depend on the text around it,
   so no other two parts of it can ever be adjacent.)
2. The regular expression, which another library interprets. Both are compared on texts that are hard to split.

All other tokenizers run with the library `tokenizers`.
"""

import re
from pathlib import Path
from typing import Any

from thinker.data.tokenizers import hf_tokenizer as hf
from thinker.data.tokenizers.hf_tokenizer import FILE_NAME, TO_BYTE, TO_CHAR, HFTokenizer
from thinker.data.tokenizers.tokenizer import ONE_CHARACTER, PROBE, Tokenizer
from thinker.runtime.errors import UserError
from thinker.runtime.reading import read_json, read_text

POSSESSIVE = r"(\{\d*,?\d*\})\+"  # possessive for tiktoken, a repeated group for `tokenizers`
# How ByteLevel splits text by default, and after Digits has separated every digit.
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
GPT2_DIGITS = r"\p{N}|'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?![^\s\p{N}])|\s+"
HARD_TEXTS = [
    PROBE,
    "I'll  we'Ve '\u017f\u00a0 it's12345678 90,5\t\r\n\r\n   x \n  \u3000y\u0085z...\n\n\n!?  \n",
    "\ufb01 \u0130 \u2177\u00b2 \u0663\u0664 \u0531\u0552 \u0e52\u0e53 \u01c5 \u0301a\u0301 \u00bd 1\u00bd",
    "\ufeff\u200b x\0\x1f\x7f  def f(x):\n\treturn x**2  # \u00e9t\u00e9\n\n",
    "🙂👩\u200d👩\u200d👧🇫🇷 한국어 हिन्दी ไทย",
]


def read(folder: Path) -> Tokenizer:
    """Read the tokenizer of a Hugging Face folder, as a tiktoken encoding if equivalent, else as an HFTokenizer.

    EOS tokens come from generation_config.json, else config.json, else tokenizer_config.json. Raises UserError if files
    are missing, damaged or need unsupported features.
    """
    content = read_json(folder / FILE_NAME)
    names = (hf.CONFIG_NAME, "generation_config.json", "config.json")
    config, *model_configs = (_read_optional(folder / name) for name in names)
    template = config.get("chat_template")
    if (folder / hf.TEMPLATE_NAME).is_file():
        template = read_text(folder / hf.TEMPLATE_NAME)
    eos, bos_id = config.pop(hf.EOS_KEY, None), config.pop(hf.BOS_KEY, None)
    for model_config in model_configs:
        eos = model_config.get("eos_token_id") if eos is None else eos
        bos_id = model_config.get("bos_token_id") if bos_id is None else bos_id
    try:
        if isinstance(template, list):  # named templates
            template = next(
                (x.get("template") for x in template if x.get("name") == "default"), None
            )
        eos_ids = [eos] if isinstance(eos, int) else list(eos or [])
        by_library = HFTokenizer(
            content, config, template, eos_ids, bos_id, _tokens_elsewhere(folder, config)
        )
        by_tiktoken = as_tiktoken(by_library)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"it has no {error}" if isinstance(error, KeyError) else error
        raise UserError(f"{folder / FILE_NAME} cannot be used: {reason}") from error
    try:
        is_equal = by_tiktoken is not None and all(
            by_tiktoken.encode(text, allow_special) == by_library.encode(text, allow_special)
            for text in HARD_TEXTS
            for allow_special in (False, True)
        )
    except UserError:  # tiktoken does not support the pattern
        is_equal = False
    return by_tiktoken if is_equal else by_library


def _read_optional(path: Path) -> dict:
    return read_json(path) if path.exists() else {}


def _tokens_elsewhere(folder: Path, config: dict) -> list[Any]:
    """Tokens, as names or dictionaries, that transformers adds to those in tokenizer.json."""
    if "added_tokens_decoder" in config:
        declared = [*config["added_tokens_decoder"].values()]
    else:  # the format before that key
        config = config | _read_optional(folder / "special_tokens_map.json")
        declared = [*_read_optional(folder / "added_tokens.json")]
    names = [config.get(name) for name in hf.SPECIAL]
    for name in ("extra_special_tokens", "additional_special_tokens"):
        extra = config.get(name) or []
        names += extra.values() if isinstance(extra, dict) else extra
    return declared + [
        name["content"] if isinstance(name, dict) else name for name in names if name is not None
    ]


def as_tiktoken(tokenizer: HFTokenizer) -> Tokenizer | None:
    """Convert to a tiktoken encoding; None if step 1 above fails or a setting has no equivalent in tiktoken."""
    content = tokenizer.content
    model, normalizer = content["model"], (content.get("normalizer") or {}).get("type")
    pattern = _pattern(content.get("pre_tokenizer"))
    is_plain_bpe = model.get("type") == "BPE" and not model.get(
        "byte_fallback"
    )  # HFTokenizer rejects other options
    is_byte_level = (content.get("decoder") or {}).get("type") == "ByteLevel"
    if not (is_plain_bpe and is_byte_level) or pattern is None or normalizer not in (None, "NFC"):
        return None
    matches_flexibly = any(
        flags[name] for flags in tokenizer.flags.values() for name in hf.FLAGS[:3]
    )
    normalized = {flags["normalized"] for flags in tokenizer.flags.values()}
    if matches_flexibly or normalized == {True, False} or (normalizer and normalized == {True}):
        return None
    special = set(tokenizer.special_tokens.values())
    pieces = {piece: number for piece, number in model["vocab"].items() if number not in special}
    if not all(set(piece) <= TO_BYTE.keys() for piece in pieces):
        return None
    ranks = {_unprinted(piece): number for piece, number in pieces.items()}
    if (
        len(ranks) < len(pieces)
        or any(bytes([b]) not in ranks for b in range(256))
        or not _same_merges(model, ranks)
    ):
        return None
    texts = {number: token for token, number in ranks.items()}
    tokens = [texts.get(number) for number in range(1 + max([*texts, *special]))]
    try:
        return Tokenizer(
            "hf", tokens, tokenizer.special_tokens, tokenizer.bos_token, pattern, normalizer=normalizer,
            eos_ids=tokenizer.eos_ids, add_bos=bool(tokenizer.bos_prefix), chat_template=tokenizer.chat_template,
            special_tokens_map=tokenizer.special_tokens_map,
            non_special_added_tokens=tokenizer.non_special_added_tokens,
        )  # fmt: skip
    except ValueError:  # tiktoken cannot read the pattern, or two names share a token
        return None


def _same_merges(model: dict, ranks: dict[bytes, int]) -> bool:
    """Whether tiktoken merges in the same way as the list of merges (step 1 above)."""
    pairs: dict[int, set[tuple[bytes, bytes]]] = {}
    newest = -1
    for merge in model["merges"]:
        first, second = merge.split(" ") if isinstance(merge, str) else merge
        if not set(first + second) <= TO_BYTE.keys():
            return False
        parts = _unprinted(first), _unprinted(second)
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
    """Merge the bytes of a token into tokens of ranks lower than `below` and return the remaining parts."""
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
    """Regular expression equivalent to a pre-tokenizer, or None if its form is unknown."""
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
    """Write tokenizer.json, tokenizer_config.json and the chat template to a folder for AutoTokenizer.

    `AutoTokenizer(text)` returns tokenizer.bos_prefix and tokenizer.encode(text, allow_special=True). Possessive counts
    such as `{1,3}+` are written without the +, because the library `tokenizers` reads them as repeated groups.
    """
    if isinstance(tokenizer, HFTokenizer):
        tokenizer.save(folder)
        return
    vocab = {
        _printed(token): number
        for number, token in enumerate(tokenizer._tokens)
        if token is not None
    }
    special = sorted(tokenizer.special_tokens.items(), key=lambda item: item[1])
    flags, visible = dict.fromkeys(hf.FLAGS, False), tokenizer.non_special_added_tokens
    added = [
        {"id": number, "content": name, **flags, "special": name not in visible}
        for name, number in special
    ]
    pattern = r"[\s\S]" if tokenizer.pattern == ONE_CHARACTER else tokenizer.pattern
    pattern = {"Regex": re.sub(POSSESSIVE, r"\1", pattern)}
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    split_step = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
    model = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None}
    model |= {
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": True,
    }
    content = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added}
    content["normalizer"] = tokenizer.normalizer and {"type": tokenizer.normalizer}
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split_step, byte_level]}
    bos = (
        [{"SpecialToken": {"id": tokenizer.bos_token, "type_id": 0}}]
        if tokenizer.bos_prefix
        else []
    )
    first, second = ([*bos, {"Sequence": {"id": name, "type_id": 0}}] for name in "AB")
    bos_ids = {
        "id": tokenizer.bos_token,
        "ids": [tokenizer.bos_id],
        "tokens": [tokenizer.bos_token],
    }
    template = {"type": "TemplateProcessing", "single": first, "pair": first + second}
    template["special_tokens"] = {tokenizer.bos_token: bos_ids}
    content |= {
        "post_processor": template if bos else None,
        "decoder": byte_level | {"use_regex": True},
    }
    content["model"] = model | {"vocab": vocab | dict(special), "merges": merges_of(tokenizer)}
    names = tokenizer.special_tokens_map
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": names.get("bos_token")}
    config |= {
        "eos_token": names.get("eos_token"),
        "pad_token": names.get("pad_token", names.get("eos_token")),
    }
    config |= {hf.ADD_BOS_KEY: bool(tokenizer.bos_prefix), "clean_up_tokenization_spaces": False}
    config["padding_side"] = (
        "left"  # with padding on the right, generate() would continue the padding
    )
    config |= {"model_max_length": max_length, "model_input_names": ["input_ids", "attention_mask"]}
    template = tokenizer.chat_template
    if template is not None and tokenizer.bos_prefix and "bos_token" not in template:
        template = "{{ bos_token }}" + template  # apply_chat_template() does not add it
    hf.write_files(Path(folder), content, config, template)


def merges_of(tokenizer: Tokenizer) -> list[list[str]]:
    """Merges that create the tokens, in order, in printable characters."""
    ranks = {token: number for number, token in enumerate(tokenizer._tokens) if token is not None}
    pairs = (split(token, ranks, number) for token, number in ranks.items())  # by increasing id
    return [[_printed(part) for part in parts] for parts in pairs if len(parts) == 2]


def _printed(token: bytes) -> str:
    return "".join(map(TO_CHAR.get, token))


def _unprinted(piece: str) -> bytes:
    return bytes(TO_BYTE[char] for char in piece)
