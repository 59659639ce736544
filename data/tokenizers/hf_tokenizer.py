"""Imported tokenizers that tiktoken cannot reproduce, run with the library `tokenizers`."""

import json
import re
import secrets
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from thinker.data.tokenizers.text_growth import check_growth
from thinker.data.tokenizers.tokenizer import MAX_VOCAB, Tokenizer, replace_surrogates
from thinker.runtime.errors import UserError
from thinker.runtime.files import atomic_write

FILE_NAME, CONFIG_NAME, TEMPLATE_NAME = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)
# Our own keys in tokenizer_config.json, for values that no other key stores or that model files may contradict.
EOS_KEY, ADD_BOS_KEY, BOS_KEY = "thinker_eos_ids", "thinker_add_bos", "thinker_bos_id"
EOS_FILES = "eos_token_id in generation_config.json or config.json"
SPECIAL = [f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")]
FLAGS = (
    "single_word",
    "lstrip",
    "rstrip",
    "normalized",
)  # of an added token; decide where it is recognized
# Byte -> the character that stands for it in a byte-level vocabulary (GPT-2's bytes_to_unicode), and back.
_PLAIN = [*range(33, 127), *range(161, 173), *range(174, 256)]
_OTHERS = [byte for byte in range(256) if byte not in _PLAIN]
TO_CHAR = {byte: chr(byte) for byte in _PLAIN} | {
    byte: chr(256 + n) for n, byte in enumerate(_OTHERS)
}
TO_BYTE = {char: byte for byte, char in TO_CHAR.items()}


class HFTokenizer(Tokenizer):
    """A tokenizer of the library `tokenizers` with the interface of Tokenizer.

    content, config: tokenizer.json and tokenizer_config.json. flags: name of an added token -> FLAGS -> bool.
    """

    def __init__(
        self, content: dict, config: dict, chat_template: str | None, eos_ids: list[int], bos_id: int | None,
        tokens_elsewhere: list[Any],
    ) -> None:  # fmt: skip
        """eos_ids, bos_id: from generation_config.json or config.json, if present.

        tokens_elsewhere: added tokens, as names or dictionaries, that files other than tokenizer.json declare. Raises
        ValueError for unsupported tokenizers. Does not call the base class, which builds a tiktoken encoding.
        """
        self.content, self.config, self.chat_template = content, config, chat_template
        self.kind, self.normalizer, self.may_lose_text = "hf", None, True
        added = content.get("added_tokens") or []
        self.special_tokens = {str(token["content"]): token["id"] for token in added}
        self.non_special_added_tokens = [
            token["content"] for token in added if not token.get("special")
        ]
        self.flags = {
            token["content"]: {flag: bool(token.get(flag)) for flag in FLAGS} for token in added
        }
        self._check(len(added), tokens_elsewhere)
        named = {name: config[name] for name in SPECIAL if config.get(name) is not None}
        self.special_tokens_map = {
            name: x.get("content") if isinstance(x, dict) else x for name, x in named.items()
        }
        eos_token = self.special_tokens_map.get("eos_token")
        self.eos_ids = eos_ids or [
            self.special_tokens[name] for name in [eos_token] if name in self.special_tokens
        ]
        if any(type(i) is not int or not 0 <= i < MAX_VOCAB for i in self.special_tokens.values()):
            raise ValueError("an added token has an invalid id")
        if any(type(i) is not int or not 0 <= i < MAX_VOCAB for i in self.eos_ids):
            raise ValueError(f"{self.eos_ids} are not valid EOS token ids ({EOS_FILES})")
        bos_names = [self.special_tokens_map.get("bos_token")]
        bos_names += [
            name for name, number in reversed(self.special_tokens.items()) if number == bos_id
        ]
        bos_names += [
            name for name, number in self.special_tokens.items() if number in self.eos_ids
        ]
        self.bos_token = next((name for name in bos_names if name), None)
        if self.bos_token not in self.special_tokens or not self.eos_ids:
            raise ValueError("it has no BOS or EOS token")
        self.bos_id, self.eos_id = self.special_tokens[self.bos_token], self.eos_ids[0]
        prefix = _template_prefix(content.get("post_processor"), self.special_tokens)
        self.bos_prefix = prefix or ([self.bos_id] if config.get(ADD_BOS_KEY) is True else [])
        if self.bos_prefix not in ([], [self.bos_id]):
            raise ValueError("texts begin with more than one special token")
        self._load()

    def _check(self, n_added: int, tokens_elsewhere: list[Any]) -> None:
        """Raise ValueError if the library or transformers would not behave as tokenizer.json states."""
        if len(self.special_tokens) < n_added:
            raise ValueError("it adds a token twice")
        if self.chat_template is not None and not isinstance(self.chat_template, str):
            raise ValueError("its chat template is not text")
        check_growth(self.content)
        model = self.content["model"]
        for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
            if model.get(name) and model.get("type") == "BPE":
                raise ValueError(f"its {name} is {model[name]!r}, which is not supported")
        if self.config.get("split_special_tokens"):
            raise ValueError("split_special_tokens is not supported")
        for token in tokens_elsewhere:
            name = token.get("content") if isinstance(token, dict) else token
            if name not in self.special_tokens:
                raise ValueError(f"it does not add the token {name!r} that other files declare")
            if (
                isinstance(token, dict)
                and {flag: bool(token.get(flag)) for flag in FLAGS} != self.flags[name]
            ):
                raise ValueError(f"other files declare its token {name!r} with different flags")

    def _load(self) -> None:
        """Load the tokenizer twice, with and without recognition of special tokens, and check the vocabulary."""
        self._with_special = _library(self.content)
        special = {
            name: i
            for name, i in self.special_tokens.items()
            if name not in self.non_special_added_tokens
        }
        self._plain = _library(_without_names(self.content, special))
        vocab = self._with_special.get_vocab()
        self.vocab_size = 1 + max(vocab.values())
        if moved := [
            name for name, number in self.special_tokens.items() if vocab.get(name) != number
        ]:
            raise ValueError(f"its token {moved[0]!r} has a different id in its vocabulary")
        if self.vocab_size > MAX_VOCAB:
            raise ValueError(
                f"its vocabulary of {self.vocab_size} is too large (maximum: {MAX_VOCAB})"
            )
        if (eos_id := max(self.eos_ids)) >= self.vocab_size:
            raise ValueError(
                f"its vocabulary of {self.vocab_size} does not contain EOS token {eos_id} ({EOS_FILES})"
            )
        self._tokens = [None] * self.vocab_size
        self._added_bytes = {
            self.special_tokens[name]: name.encode() for name in self.non_special_added_tokens
        }
        to_bytes, added_ids = _piece_to_bytes(self.content), set(self.special_tokens.values())
        for piece, number in vocab.items():
            if number not in added_ids:
                self._tokens[number] = to_bytes(piece)
        adds_space = self.decode_bytes(self.encode("a")).startswith(b" ")
        if (stated := self.config.get("add_prefix_space")) not in (None, adds_space):
            raise ValueError(f"add_prefix_space is {stated}, but tokenizer.json does the opposite")

    def encode_array(self, text: str, allow_special: bool = False) -> np.ndarray:
        """Encode a text to a 1-D array of uint32; see encode()."""
        library = (
            self._with_special if allow_special else self._plain
        )  # both recognize non-special added tokens
        try:
            return np.array(
                library.encode(replace_surrogates(text), add_special_tokens=False).ids,
                dtype=np.uint32,
            )
        except BaseException as error:
            if not _is_of_library(error):
                raise
            raise UserError(f"the tokenizer cannot encode {text[:40]!r}: {error}") from error

    def decode(self, ids: Iterable[int]) -> str:
        """Like Tokenizer.decode(), without the space that encoding adds before a text."""
        ids = list(ids)
        self.decode_bytes(ids)  # raises for ids out of range
        return self._with_special.decode(ids, skip_special_tokens=True)

    def _content(self) -> dict:
        content = {
            "tokenizer": self.content,
            "chat_template": self.chat_template,
            "bos_token": self.bos_token,
        }
        content |= {"eos_ids": self.eos_ids, "add_bos": bool(self.bos_prefix)}
        return content | {"special_tokens_map": self.special_tokens_map}

    def save(self, folder: str | Path) -> Path:
        """Write the Hugging Face files to an existing folder."""
        config = self.config | {EOS_KEY: self.eos_ids, BOS_KEY: self.bos_id}
        write_files(Path(folder), self.content, config, self.chat_template)
        return Path(folder) / FILE_NAME


def write_files(folder: Path, content: dict, config: dict, chat_template: str | None) -> None:
    """Write tokenizer.json, tokenizer_config.json and the chat template, each atomically."""
    for name, values in ((CONFIG_NAME, config), (FILE_NAME, content)):
        atomic_write(folder / name, json.dumps(values, ensure_ascii=False, indent=1))
    if chat_template is not None:
        atomic_write(folder / TEMPLATE_NAME, chat_template)


def _without_names(content: dict, special: dict[str, int]) -> dict:
    """Rename these tokens in tokenizer.json so that no text can match them; ids do not change."""
    secret, model = secrets.token_hex(16), content["model"]
    new = {name: f"{secret} {number}" for name, number in special.items()}
    changed = {"unk_token": new.get(model.get("unk_token"), model.get("unk_token"))}
    if isinstance(model.get("vocab"), dict):
        changed["vocab"] = {
            new.get(piece, piece): number for piece, number in model["vocab"].items()
        }
    else:  # a Unigram model lists its pieces by id
        changed["vocab"] = [[new.get(piece, piece), score] for piece, score in model["vocab"]]
    if "merges" in model:
        pairs = [
            tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge)
            for merge in model["merges"]
        ]
        changed["merges"] = [pair for pair in pairs if not new.keys() & {*pair, "".join(pair)}]
    added = [
        token | {"content": new.get(token["content"], token["content"])}
        for token in content["added_tokens"]
    ]
    return content | {"model": model | changed, "added_tokens": added, "post_processor": None}


def _template_prefix(post_processor: dict | None, added: dict[str, int]) -> list[int]:
    """Special tokens that a post-processor adds before a text. Raises ValueError if it adds some after the text."""
    steps = post_processor or {}
    steps = steps["processors"] if steps.get("type") == "Sequence" else [steps]
    prefix: list[int] = []
    for step in steps:
        if step.get("type") == "TemplateProcessing":
            kinds = [next(iter(part), None) for part in step["single"]]
            text = kinds.index("Sequence")
            if text < len(kinds) - 1:
                raise ValueError("its post-processor ends every text with a special token")
            prefix += [added[part["SpecialToken"]["id"]] for part in step["single"][:text]]
        elif step.get("type") not in (None, "ByteLevel"):
            raise ValueError(f"its post-processor {step.get('type')} is not supported")
    return prefix


def _piece_to_bytes(content: dict) -> Callable[[str], bytes]:
    """Return the function from a vocabulary piece to its bytes. Raises ValueError for an unknown decoder."""
    kinds = re.findall(r'"type": ?"(\w+)"', json.dumps(content.get("decoder") or {}))
    if "ByteLevel" in kinds:
        return lambda piece: (
            bytes(TO_BYTE[char] for char in piece)
            if set(piece) <= TO_BYTE.keys()
            else piece.encode()
        )
    if not {"Metaspace", "ByteFallback", "Replace"} & set(kinds):
        raise ValueError(
            f"its decoder is {' of '.join(kinds) or 'missing'} (supported: ByteLevel, Metaspace)"
        )

    def from_sentencepiece(piece: str) -> bytes:
        number = re.fullmatch("<0x([0-9A-F]{2})>", piece)
        return bytes([int(number[1], 16)]) if number else piece.replace("▁", " ").encode()

    return from_sentencepiece


def _library(content: dict) -> Any:
    """Create the library's tokenizer. Raises ValueError if the library rejects the content."""
    import tokenizers

    try:
        library = tokenizers.Tokenizer.from_str(json.dumps(content))
    except BaseException as error:
        if not _is_of_library(error):
            raise
        raise ValueError(f"the tokenizers library rejects it: {error}") from error
    library.no_truncation()
    library.no_padding()
    return library


def _is_of_library(error: BaseException) -> bool:
    """Whether the library raised the error: a plain Exception or a Rust panic, which is a BaseException."""
    return type(error) is Exception or type(error).__name__ == "PanicException"
