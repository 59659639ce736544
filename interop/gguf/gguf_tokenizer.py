"""The tokenizer in the header of a GGUF file, which becomes a tokenizer.json."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from thinker.data.tokenizers.hf_tokenizer import FLAGS
from thinker.data.tokenizers.tokenizer import Tokenizer
from thinker.data.tokenizers.tokenizer_conversion import GPT2, convert
from thinker.runtime.errors import UserError

KEY = "tokenizer.ggml."

# Types of tokens.
NORMAL = 1
UNKNOWN = 2
CONTROL = 3
USER_DEFINED = 4
UNUSED = 5
BYTE = 6

# Keys of the ids at which llama.cpp ends a text. It reads one id from each.
END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
ALL_ENDS = "eos_token_ids"  # which Ollama's own engine reads

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")
DIGIT = r"\p{N}"
# For a name in tokenizer.ggml.pre: the patterns by which llama.cpp splits a text, one after the
# other. Names whose patterns it only approximates are left out.
PATTERNS = {
    "llama-bpe": [LLAMA3],
    "llama3": [LLAMA3],
    "llama-v3": [LLAMA3],
    "falcon3": [LLAMA3],
    "dbrx": [LLAMA3],
    "smaug-bpe": [LLAMA3],
    "gpt-2": [GPT2],
    "phi-2": [GPT2],
    "mpt": [GPT2],
    "olmo": [GPT2],
    "jais": [GPT2],
    "qwen2": [QWEN2],
    "deepseek-r1-qwen": [QWEN2],
    "stablelm2": [QWEN2],
    "smollm": [DIGIT, GPT2],
    "starcoder": [DIGIT, GPT2],
    "refact": [DIGIT, GPT2],
    "command-r": [DIGIT, GPT2],
    "codeshell": [DIGIT, GPT2],
    "exaone": [DIGIT, GPT2],
    "minerva-7b": [DIGIT, GPT2],
    "default": [r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"],
}
# With these, a whole word that is a token is not built by merges, and a text begins with BOS.
WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3", "falcon3")

# If the name of a model says Phi-3, its special tokens, except these, take the spaces behind them
# in llama.cpp.
PHI3_NAMES = ("phi-3", "phi3")
PHI3_KEEPS_SPACES = ("<unk>", "<s>", "<|endoftext|>")


def read_tokenizer(fields: Mapping[str, Any], vocab_size: int) -> Tokenizer:
    """The tokenizer that a header describes.

    vocab_size: of the model. Raises UserError if it is missing, damaged or not supported.
    """
    header = {}
    for name, value in fields.items():
        if name.startswith(KEY):
            header[name.removeprefix(KEY)] = value
    kind = header.get("model")
    tokens, types = _read_tokens(header, vocab_size)
    if kind == "gpt2":
        content, begins_with_bos = _byte_level(header, tokens, types)
    elif kind == "llama":
        content, begins_with_bos = _sentencepiece(header, tokens, types)
    else:
        raise UserError(f"its tokenizer is of the kind {kind!r}; those that are read: gpt2, llama")
    if header.get("add_eos_token"):
        raise UserError("its tokenizer ends every text with the EOS token, which is not supported")

    eos_ids = _end_ids(header, len(tokens))
    bos_id = header.get("bos_token_id", eos_ids[0])
    if type(bos_id) is not int or not 0 <= bos_id < len(tokens):
        raise UserError(f"its bos_token_id is {bos_id!r}, which is no token")
    added = _added_tokens(tokens, types, {bos_id, eos_ids[0]})
    if takes_spaces(fields.get("general.name")):
        for token in added:
            token["rstrip"] = token["content"] not in PHI3_KEEPS_SPACES
    content["added_tokens"] = added
    if header.get("add_bos_token", begins_with_bos):
        content["post_processor"] = _begin_with(tokens[bos_id], bos_id)
    config = {"bos_token": tokens[bos_id], "eos_token": tokens[eos_ids[0]]}
    template = fields.get("tokenizer.chat_template")
    try:
        return convert(content, config, template, eos_ids, bos_id, [])
    except KeyError as error:
        raise UserError(f"its tokenizer has no {error}") from error
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(f"its tokenizer cannot be used: {error}") from error


def takes_spaces(name: Any) -> bool:
    """Whether special tokens take the spaces behind them in llama.cpp, by the name of a model."""
    return any(part in str(name).lower() for part in PHI3_NAMES)


def _read_tokens(header: Mapping[str, Any], vocab_size: int) -> tuple[list[str], list[int]]:
    """The text and the type of each token."""
    tokens = header.get("tokens")
    if not isinstance(tokens, list) or not tokens or not all(isinstance(t, str) for t in tokens):
        raise UserError("it has no list of tokens")
    if len(tokens) > vocab_size:
        raise UserError(f"it has {len(tokens)} tokens, but its model has {vocab_size}")
    types = header.get("token_type", [NORMAL] * len(tokens))
    if not isinstance(types, list) or len(types) != len(tokens):
        raise UserError("its list of types has not one type for each token")
    if len(set(tokens)) < len(tokens):
        raise UserError("it has a token twice")
    return tokens, types


def _end_ids(header: Mapping[str, Any], n_tokens: int) -> list[int]:
    ends = [header[name] for name in END_KEYS if name in header]
    more = header.get(ALL_ENDS, [])
    if isinstance(more, list):
        ends += more
    ends = list(dict.fromkeys(ends))
    if not ends or not all(type(end) is int and 0 <= end < n_tokens for end in ends):
        raise UserError(f"its EOS tokens {ends} are not ids of tokens")
    return ends


def _added_tokens(tokens: list[str], types: list[int], ends: set[int]) -> list[dict[str, Any]]:
    """Tokens that are found as a whole: special ones, and those that users defined."""
    added = []
    for number, (text, kind) in enumerate(zip(tokens, types)):
        is_special = kind in (CONTROL, UNKNOWN) or number in ends
        if is_special or kind == USER_DEFINED:
            flags = dict.fromkeys(FLAGS, False)
            added.append({"id": number, "content": text, **flags, "special": is_special})
    return added


def _begin_with(name: str, number: int) -> dict[str, Any]:
    """The post-processor that begins a text with a token."""
    bos = {"SpecialToken": {"id": name, "type_id": 0}}
    first = {"Sequence": {"id": "A", "type_id": 0}}
    second = {"Sequence": {"id": "B", "type_id": 1}}
    return {
        "type": "TemplateProcessing",
        "single": [bos, first],
        "pair": [bos, first, bos, second],
        "special_tokens": {name: {"id": name, "ids": [number], "tokens": [name]}},
    }


def _byte_level(
    header: Mapping[str, Any], tokens: list[str], types: list[int]
) -> tuple[dict[str, Any], bool]:
    """tokenizer.json of a byte-level BPE, and whether texts begin with BOS by default."""
    pre = header.get("pre", "default")
    if pre not in list(PATTERNS):  # a list, as it may be of any type
        known = ", ".join(PATTERNS)
        raise UserError(f"its tokenizer splits texts as {pre!r}; those that are read: {known}")
    merges = header.get("merges")
    if not isinstance(merges, list) or not all(isinstance(merge, str) for merge in merges):
        raise UserError("it has no list of merges")
    vocab = {}
    for number, (text, kind) in enumerate(zip(tokens, types)):
        if kind != UNUSED:
            vocab[text] = number
    pairs = []
    for merge in merges:
        first, _, second = merge[1:].partition(" ")
        pair = [merge[:1] + first, second]
        # llama.cpp ignores a merge that does not result in a token.
        if "".join(pair) in vocab and set(pair) <= vocab.keys():
            pairs.append(pair)
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    steps = []
    for pattern in PATTERNS[pre]:
        split = {"pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        steps.append({"type": "Split"} | split)
    if PATTERNS[pre] == [DIGIT, GPT2]:
        # The same, as transformers writes it.
        steps = [{"type": "Digits", "individual_digits": True}]
        last = byte_level | {"use_regex": True}
    else:
        last = byte_level
    content = {
        "version": "1.0",
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*steps, last]},
        "post_processor": None,
        "decoder": byte_level | {"use_regex": True},
        "model": _bpe(vocab, pairs, ignore_merges=pre in WHOLE_WORDS),
    }
    return content, pre in WHOLE_WORDS


def _bpe(vocab: dict[str, int], merges: list[list[str]], **options: Any) -> dict[str, Any]:
    """The model of a tokenizer.json."""
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": vocab,
        "merges": merges,
    }
    return model | options


def _sentencepiece(
    header: Mapping[str, Any], tokens: list[str], types: list[int]
) -> tuple[dict[str, Any], bool]:
    """tokenizer.json of a BPE of SentencePiece, and whether texts begin with BOS by default.

    SentencePiece merges the pair of pieces whose result has the highest score.
    """
    scores = header.get("scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise UserError("its tokenizer has not one score for each token")
    vocab = {text: number for number, text in enumerate(tokens)}
    n_bytes = sum(f"<0x{byte:02X}>" in vocab for byte in range(256))
    if n_bytes < 256:
        raise UserError(f"its tokenizer has only {n_bytes} of 256 tokens for bytes")
    pieces = {}
    whole = set()  # found before any merge
    for text, number in vocab.items():
        if types[number] in (NORMAL, UNUSED):
            pieces[text] = number
        else:
            whole.add(text)
    merges = _merges_by_score(pieces, whole, scores)
    unknown = None
    if UNKNOWN in types:
        unknown = tokens[types.index(UNKNOWN)]
    steps = [{"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]
    decoders = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if header.get("add_space_prefix", True):
        steps = [{"type": "Prepend", "prepend": "▁"}, *steps]
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    content = {
        "version": "1.0",
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": _bpe(vocab, merges, byte_fallback=True, fuse_unk=True, unk_token=unknown),
    }
    return content, True


def _merges_by_score(
    pieces: Mapping[str, int], whole: set[str], scores: list[float]
) -> list[list[str]]:
    """Merges in the order of the scores of their results, highest first.

    Raises UserError if the scores do not determine this order, or a piece has a character that is
    no token.
    """
    ranked = []
    for piece, number in pieces.items():
        pairs = []
        for place in range(1, len(piece)):
            pair = [piece[:place], piece[place:]]
            if set(pair) <= pieces.keys():
                pairs.append(pair)
            elif all(part in pieces or (len(part) == 1 and part not in whole) for part in pair):
                raise UserError(f"its token {piece!r} has a character that is no token")
        if pairs:
            ranked.append((scores[number], pairs))
    ranked.sort(key=lambda entry: -entry[0])
    for first, second in pairwise(ranked):
        if first[0] == second[0]:
            raise UserError(f"several of its tokens have the score {first[0]}")
    merges = []
    for _, pairs in ranked:
        merges += pairs
    return merges
