"""Conversion from and to Hugging Face's tokenizer.json and tokenizer_config.json.

A byte-level BPE becomes a tiktoken encoding, which is five times as fast (docs/benchmarks/data.md),
if it produces the same ids for every text. This is verified in two steps:

1. The merges. tiktoken merges the pair whose token has the lowest id; Hugging Face follows a list.
   The two agree if the list creates tokens in the order of their ids, and if merging each token's
   bytes with only lower ids leaves two parts that are a pair of the list. (Until a token is
   created, merges inside its bytes do not depend on the text around it, so no other two parts of it
   can ever be adjacent.)
2. The regular expression, which another library interprets. Both are compared on texts that are
   hard to split.

All other tokenizers run with the library `tokenizers`.
"""

import re
from pathlib import Path
from typing import Any

from thinker.data.tokenizers import hf_tokenizer as hf
from thinker.data.tokenizers import older_files
from thinker.data.tokenizers.hf_tokenizer import FILE_NAME, TO_CHAR, HFTokenizer, unprinted
from thinker.data.tokenizers.pad_token import (
    add_pad_token,
    find_pad_token,
    is_named,
    new_pad_token,
    remove_pad_token,
)
from thinker.data.tokenizers.tokenizer import ONE_CHARACTER, PROBE, SINGLE_BYTES, Tokenizer
from thinker.runtime.errors import UserError
from thinker.runtime.reading import read_json, read_text

OLDER_NAMES = "special_tokens_map.json"
POSSESSIVE = r"(\{\d*,?\d*\})\+"  # possessive for tiktoken, a repeated group for `tokenizers`
# How ByteLevel splits text by default, and after Digits has separated every digit.
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
GPT2_DIGITS = r"\p{N}|'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?![^\s\p{N}])|\s+"
HARD_TEXTS = [
    PROBE,
    "I'll  we'Ve '\u017f\u00a0 it's12345678 90,5\t\r\n\r\n   x \n  \u3000y\u0085z...\n\n\n!?  \n",
    "\ufb01 \u0130 \u2177\u00b2 \u0663\u0664 \u0531\u0552 \u0e52\u0e53 \u01c5 \u0301a\u0301 \u00bd "
    "1\u00bd",
    "\ufeff\u200b x\0\x1f\x7f  def f(x):\n\treturn x**2  # \u00e9t\u00e9\n\n",
    "🙂👩\u200d👩\u200d👧🇫🇷 한국어 हिन्दी ไทย",
]


def read(folder: Path) -> Tokenizer:
    """Read the tokenizer of a Hugging Face folder, as a tiktoken encoding if that is equivalent.

    EOS tokens come from generation_config.json, else config.json, else tokenizer_config.json.
    Raises UserError if files are missing, damaged or need unsupported features.
    """
    if older_files.find_older_files(folder):
        content, config = older_files.convert(folder)
    else:
        content = read_json(folder / FILE_NAME)
        config = _read_optional(folder / hf.CONFIG_NAME)
        if "added_tokens_decoder" not in config:  # the format before that key
            config = config | hf.special_token_names(_read_optional(folder / OLDER_NAMES))
    template = config.get("chat_template")
    if (folder / hf.TEMPLATE_NAME).is_file():
        template = read_text(folder / hf.TEMPLATE_NAME)
    eos = config.pop(hf.EOS_KEY, None)
    bos_id = config.pop(hf.BOS_KEY, None)
    n_ids = None
    for name in ("generation_config.json", "config.json"):
        model_config = _read_optional(folder / name)
        n_ids = model_config.get("vocab_size")
        if eos is None:
            eos = model_config.get("eos_token_id")
        if bos_id is None:
            bos_id = model_config.get("bos_token_id")
    try:
        if isinstance(template, list):
            template = _default_template(template)
        eos_ids = [eos] if isinstance(eos, int) else list(eos or [])
        if isinstance(n_ids, int):
            content, config = _without_tokens_from(content, config, n_ids, template)
        if "bos_token" not in config and "eos_token" not in config:
            config = config | _names_of_ids(content, bos_id, eos_ids)
        elsewhere = _tokens_elsewhere(folder, config)
        pad_token = new_pad_token(config)
        if pad_token is not None:
            content, config = remove_pad_token(content, config, pad_token)
            elsewhere = [token for token in elsewhere if not is_named(token, pad_token)]
        return convert(content, config, template, eos_ids, bos_id, elsewhere)
    except KeyError as error:
        raise UserError(f"{folder / FILE_NAME} cannot be used: it has no {error}") from error
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{folder / FILE_NAME} cannot be used: {error}") from error


def convert(
    content: dict,
    config: dict,
    template: str | None,
    eos_ids: list[int],
    bos_id: int | None,
    elsewhere: list[Any],
) -> Tokenizer:
    """A tokenizer.json as a tiktoken encoding if that is equivalent, else as an HFTokenizer.

    The arguments and the errors are those of HFTokenizer.
    """
    by_library = HFTokenizer(content, config, template, eos_ids, bos_id, elsewhere)
    by_tiktoken = as_tiktoken(by_library)
    if by_tiktoken is not None and _encode_alike(by_tiktoken, by_library):
        return by_tiktoken
    return by_library


def _default_template(named: list[dict]) -> str | None:
    """One of several named chat templates."""
    for template in named:
        if template.get("name") == "default":
            return template.get("template")
    return None


def _encode_alike(by_tiktoken: Tokenizer, by_library: HFTokenizer) -> bool:
    """Whether both split hard texts in the same way (step 2 above)."""
    try:
        for text in HARD_TEXTS:
            for allow_special in (False, True):
                ids = by_tiktoken.encode(text, allow_special)
                if ids != by_library.encode(text, allow_special):
                    return False
    except UserError:  # tiktoken does not support the pattern
        return False
    return True


def _read_optional(path: Path) -> dict:
    if not path.exists():
        return {}
    return read_json(path)


def _without_tokens_from(
    content: dict, config: dict, n_ids: int, template: str | None
) -> tuple[dict, dict]:
    """tokenizer.json and tokenizer_config.json without added tokens that the model has no id for,
    except those that the template names.

    Small models of Gemma 3 have the tokenizer of the larger ones, with a token for images.
    """
    written = ""  # a token that the template writes is needed
    if template is not None:
        written = template
    outside = []
    for token in content["added_tokens"]:
        if token["id"] >= n_ids and token["content"] not in written:
            outside.append(token["content"])
    if not outside:
        return content, config

    def is_inside(token: Any) -> bool:
        return not any(is_named(token, name) for name in outside)

    vocab = content["model"]["vocab"]
    if isinstance(vocab, dict):
        vocab = {piece: number for piece, number in vocab.items() if is_inside(piece)}
    content = content | {
        "added_tokens": list(filter(is_inside, content["added_tokens"])),
        "model": content["model"] | {"vocab": vocab},
    }
    inside = {}
    for key, value in config.items():
        if isinstance(value, list):
            value = list(filter(is_inside, value))
        elif key in ("added_tokens_decoder", "extra_special_tokens") and isinstance(value, dict):
            value = {name: token for name, token in value.items() if is_inside(token)}
        if is_inside(value):
            inside[key] = value
    return content, inside


def _names_of_ids(content: dict, bos_id: int | None, eos_ids: list[int]) -> dict[str, str]:
    """The names of the BOS and EOS token, where GPT-2's files leave them to a class of
    transformers."""
    names = {}
    for token in content["added_tokens"]:
        if token["id"] == bos_id:
            names["bos_token"] = token["content"]
        if eos_ids and token["id"] == eos_ids[0]:
            names["eos_token"] = token["content"]
    return names


def _tokens_elsewhere(folder: Path, config: dict) -> list[Any]:
    """Tokens, as names or dictionaries, that transformers adds to those in tokenizer.json."""
    if "added_tokens_decoder" in config:
        declared = list(config["added_tokens_decoder"].values())
    else:  # the format before that key
        config = config | _read_optional(folder / OLDER_NAMES)
        declared = list(_read_optional(folder / "added_tokens.json"))
    names = [config.get(name) for name in hf.SPECIAL]
    for key in ("extra_special_tokens", "additional_special_tokens"):
        extra = config.get(key) or []
        if isinstance(extra, dict):
            extra = extra.values()
        names.extend(extra)
    for name in names:
        if isinstance(name, dict):
            declared.append(name["content"])
        elif name is not None:
            declared.append(name)
    return declared


def as_tiktoken(tokenizer: HFTokenizer) -> Tokenizer | None:
    """Convert to a tiktoken encoding.

    Returns None if step 1 above fails or a setting has no equivalent in tiktoken.
    """
    content = tokenizer.content
    model = content["model"]
    # HFTokenizer has rejected other options of BPE.
    if model.get("type") != "BPE" or model.get("byte_fallback"):
        return None
    decoder = content.get("decoder") or {}
    normalizer = (content.get("normalizer") or {}).get("type")
    pattern = _pattern(content.get("pre_tokenizer"))
    if decoder.get("type") != "ByteLevel" or normalizer not in (None, "NFC") or pattern is None:
        return None
    if not _finds_names_alike(tokenizer, normalizer):
        return None
    # Special tokens are no part of the merges.
    special = set(tokenizer.special_tokens.values())
    ranks: dict[bytes, int] = {}
    for piece, number in model["vocab"].items():
        if number in special:
            continue
        token = unprinted(piece)
        if token is None or token in ranks:
            return None
        ranks[token] = number
    has_all_bytes = set(SINGLE_BYTES) <= ranks.keys()
    if not has_all_bytes or not _same_merges(model, ranks):
        return None
    texts = {number: token for token, number in ranks.items()}
    vocab_size = 1 + max([*texts, *special])
    try:
        return Tokenizer(
            "hf",
            [texts.get(number) for number in range(vocab_size)],
            tokenizer.special_tokens,
            tokenizer.bos_token,
            pattern,
            normalizer=normalizer,
            eos_ids=tokenizer.eos_ids,
            add_bos=bool(tokenizer.bos_prefix),
            chat_template=tokenizer.chat_template,
            special_tokens_map=tokenizer.special_tokens_map,
            non_special_added_tokens=tokenizer.non_special_added_tokens,
        )
    except ValueError:  # tiktoken cannot read the pattern, or two names share a token
        return None


def _finds_names_alike(tokenizer: HFTokenizer, normalizer: str | None) -> bool:
    """Whether tiktoken finds names of added tokens in a text where the library does."""
    normalized = set()
    for flags in tokenizer.flags.values():
        if flags["single_word"] or flags["lstrip"] or flags["rstrip"]:
            return False
        normalized.add(flags["normalized"])
    if normalized == {True, False}:  # in two passes
        return False
    # We look for names before we normalize.
    return normalizer is None or normalized != {True}


def _same_merges(model: dict, ranks: dict[bytes, int]) -> bool:
    """Whether tiktoken merges in the same way as the list of merges (step 1 above)."""
    pairs: dict[int, set[tuple[bytes, bytes]]] = {}  # of the list, by the id that they create
    newest = -1
    for merge in model["merges"]:
        first, second = hf.pair_of(merge)
        left = unprinted(first)
        right = unprinted(second)
        if left is None or right is None:
            return False
        number = ranks.get(left + right)
        if number is None or number < newest or left not in ranks or right not in ranks:
            return False
        newest = number
        pairs.setdefault(number, set()).add((left, right))
    for token, number in ranks.items():
        if len(token) == 1:
            if number in pairs:
                return False
            continue
        parts = tuple(split(token, ranks, number))
        if number in pairs:
            is_same = parts in pairs[number]
        else:
            # tiktoken finds a token that no merge creates if it is a whole word, and the library
            # does so with this option.
            is_same = len(parts) != 2 and model.get("ignore_merges")
        if not is_same:
            return False
    return True


def split(token: bytes, ranks: dict[bytes, int], below: int) -> list[bytes]:
    """Merge the bytes of a token into tokens of ranks lower than `below`.

    Returns the remaining parts.
    """
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
    steps = [pre_tokenizer or {}]
    if steps[0].get("type") == "Sequence":
        steps = steps[0]["pretokenizers"]
    kinds = [step.get("type") for step in steps]
    if kinds[-1:] != ["ByteLevel"] or steps[-1].get("add_prefix_space"):
        return None
    uses_regex = steps[-1].get("use_regex", True)  # GPT-2's
    if kinds == ["ByteLevel"] and uses_regex:
        return GPT2
    if kinds == ["Digits", "ByteLevel"] and uses_regex and steps[0].get("individual_digits"):
        return GPT2_DIGITS
    if kinds == ["Split", "ByteLevel"] and not uses_regex:
        return _pattern_of_split(steps[0])
    return None


def _pattern_of_split(step: dict) -> str | None:
    way = step.get("behavior"), bool(step.get("invert"))
    # Files that were converted from tiktoken instead remove what the pattern does not match.
    if way not in (("Isolated", False), ("Removed", True)):
        return None
    regex = step["pattern"].get("Regex")
    if regex is None or re.search(POSSESSIVE, regex):
        return None
    return regex


def write(
    tokenizer: Tokenizer, folder: str | Path, max_length: int, model_vocab_size: int = 0
) -> None:
    """Write tokenizer.json, tokenizer_config.json and the chat template for AutoTokenizer.

    `AutoTokenizer(text)` returns tokenizer.bos_prefix and tokenizer.encode(text,
    allow_special=True), except that it also finds the name of the pad token, which has an id of its
    own among the `model_vocab_size` ids of the model (0: those of the tokenizer), or is missing.
    Possessive counts such as `{1,3}+` are written without the +, because the library `tokenizers`
    reads them as repeated groups.
    """
    template = _template_with_bos(tokenizer)
    if isinstance(tokenizer, HFTokenizer):
        content = tokenizer.content
        config = tokenizer.stored_config()
    else:
        content = _tokenizer_json(tokenizer)
        config = _tokenizer_config(tokenizer, max_length)
    pad = find_pad_token(tokenizer, model_vocab_size)
    content, config = add_pad_token(content, config, pad)
    hf.write_files(Path(folder), content, config, template)


def _template_with_bos(tokenizer: Tokenizer) -> str | None:
    """The chat template, which begins with the BOS token if prompts do: apply_chat_template() does
    not add it."""
    template = tokenizer.chat_template
    if template is None or not tokenizer.bos_prefix:
        return template
    if "bos_token" in template or tokenizer.bos_token in template:
        return template
    return "{{ bos_token }}" + template


def _tokenizer_json(tokenizer: Tokenizer) -> dict[str, Any]:
    pattern = tokenizer.pattern
    if pattern == ONE_CHARACTER:
        pattern = r"[\s\S]"  # the library does not know (?s)
    pattern = re.sub(POSSESSIVE, r"\1", pattern)
    split_step = {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    special = sorted(tokenizer.special_tokens.items(), key=lambda item: item[1])
    vocab = {}
    for number, token in enumerate(tokenizer._tokens):
        if token is not None:
            vocab[_printed(token)] = number
    vocab.update(special)
    normalizer = None
    if tokenizer.normalizer is not None:
        normalizer = {"type": tokenizer.normalizer}
    post_processor = None
    if tokenizer.bos_prefix:
        post_processor = _bos_template(tokenizer)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added_token(tokenizer, name, number) for name, number in special],
        "normalizer": normalizer,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split_step, byte_level]},
        "post_processor": post_processor,
        "decoder": byte_level | {"use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": True,
            "vocab": vocab,
            "merges": merges_of(tokenizer),
        },
    }


def _added_token(tokenizer: Tokenizer, name: str, number: int) -> dict[str, Any]:
    flags = dict.fromkeys(hf.FLAGS, False)
    is_special = name not in tokenizer.non_special_added_tokens
    return {"id": number, "content": name, **flags, "special": is_special}


def _bos_template(tokenizer: Tokenizer) -> dict[str, Any]:
    """The post-processor that adds the BOS token before a text or a pair of texts."""
    name = tokenizer.bos_token
    bos = {"SpecialToken": {"id": name, "type_id": 0}}
    first = {"Sequence": {"id": "A", "type_id": 0}}
    second = {"Sequence": {"id": "B", "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [bos, first],
        "pair": [bos, first, bos, second],
        "special_tokens": {name: {"id": name, "ids": [tokenizer.bos_id], "tokens": [name]}},
    }


def _tokenizer_config(tokenizer: Tokenizer, max_length: int) -> dict[str, Any]:
    names = tokenizer.special_tokens_map
    return {
        "tokenizer_class": hf.FAST_CLASS,
        "bos_token": names.get("bos_token"),
        "eos_token": names.get("eos_token"),
        hf.ADD_BOS_KEY: bool(tokenizer.bos_prefix),
        "clean_up_tokenization_spaces": False,
        "padding_side": "left",  # generate() would continue padding on the right
        "model_max_length": max_length,
        "model_input_names": ["input_ids", "attention_mask"],
    }


def merges_of(tokenizer: Tokenizer) -> list[list[str]]:
    """Merges that create the tokens, in order, in printable characters."""
    ranks = {token: number for number, token in enumerate(tokenizer._tokens) if token is not None}
    merges = []
    for token, number in ranks.items():  # by increasing id
        parts = split(token, ranks, number)
        if len(parts) == 2:
            merges.append([_printed(part) for part in parts])
    return merges


def _printed(token: bytes) -> str:
    """A token in printable characters."""
    return "".join(map(TO_CHAR.get, token))
