"""Tokenizers that are run through the library `tokenizers`: those that tiktoken cannot follow."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np

from data.tokenizer import MAX_VOCAB, Tokenizer
from errors import UserError

FILE_NAME, CONFIG_NAME, TEMPLATE_NAME = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
EOS_KEY = "thinker_eos_ids"  # in a run's tokenizer_config.json, which has no model's file beside it


def _printable() -> dict[int, str]:
    """byte -> the character that stands for it in a byte-level vocabulary (GPT-2's encoder)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {byte: chr(256 + n) for n, byte in enumerate(others)}


TO_CHAR = _printable()
TO_BYTE = {char: byte for byte, char in TO_CHAR.items()}


class Files:
    """What tokenizer.json, tokenizer_config.json, chat_template.jinja and the model's own files say of a tokenizer."""

    def __init__(self, tokenizer: dict, config: dict, chat_template: str | None, eos_ids: list[int]) -> None:
        """`eos_ids`: as generation_config.json or config.json has them, if they do. Raises ValueError."""
        self.tokenizer, self.config, self.chat_template = tokenizer, config, chat_template
        added = tokenizer.get("added_tokens") or []
        self.added = {str(token["content"]): int(token["id"]) for token in added}
        self.visible = [token["content"] for token in added if not token.get("special")]
        self.bendable = any(token.get(name) for token in added for name in ("lstrip", "rstrip", "single_word"))
        self.normalized = any(token.get("normalized") for token in added)
        names = {name: self._named(name) for name in ("bos_token", "eos_token")}
        self.eos_ids = eos_ids or [self.added[name] for name in [names["eos_token"]] if name in self.added]
        self.boundary = names["bos_token"] or next((n for n, i in self.added.items() if i in self.eos_ids), None)
        if self.boundary not in self.added or not self.eos_ids:
            raise ValueError("it names no token that begins or ends a text")
        self.bos_id = self.added[self.boundary]
        before = _template(tokenizer.get("post_processor"), self.added)
        self.prompt_start = before or ([self.bos_id] if config.get("add_bos_token") is True else [])
        if self.prompt_start not in ([], [self.bos_id]):
            raise ValueError("texts begin with more than one special token")

    def _named(self, name: str) -> str | None:
        value = self.config.get(name)
        return value.get("content") if isinstance(value, dict) else value

    def content(self) -> dict:
        """What decides how text is encoded, and what ends it."""
        names = {"boundary": self.boundary, "eos": self.eos_ids, "begins": bool(self.prompt_start)}
        return {"tokenizer": self.tokenizer, "chat_template": self.chat_template} | names

    def write(self, folder: Path) -> Path:
        """Into an existing folder, each whole or not at all. Returns the path of tokenizer.json."""
        write_json(folder / CONFIG_NAME, self.config | {EOS_KEY: self.eos_ids})
        if self.chat_template is not None:
            replace_text(folder / TEMPLATE_NAME, self.chat_template)
        return write_json(folder / FILE_NAME, self.tokenizer)


class ForeignTokenizer(Tokenizer):
    """One that is run through the library `tokenizers`, behind the same methods."""

    def __init__(self, files: Files) -> None:  # not tiktoken's: nothing of the base's __init__ is wanted
        self._files, content = files, files.tokenizer
        self._whole = _library(content)
        self._plain = _library(content | {"added_tokens": [], "post_processor": None})
        self.kind, self.normalizer, self.chat_template = "hf", None, files.chat_template
        self.special_tokens, self.boundary = files.added, files.boundary
        self.vocab_size = 1 + max([*self._whole.get_vocab().values()])
        self.bos_id, self.eos_ids, self.prompt_start = files.bos_id, files.eos_ids, files.prompt_start
        self.eos_id, self.visible = self.eos_ids[0], files.visible
        self._names = {files.added[name]: name.encode() for name in self.visible}
        special = set(files.added.values())
        if self.vocab_size > MAX_VOCAB:
            raise ValueError(f"it has ids up to {self.vocab_size}")
        self._tokens = [None] * self.vocab_size
        to_bytes = _piece_bytes(content)
        for piece, number in self._whole.get_vocab().items():
            if number not in special:
                self._tokens[number] = to_bytes(piece)

    def encode(self, text: str, allow_special: bool = False) -> list[int]:
        """As Tokenizer.encode."""
        return self._run(self._whole, text).tolist() if allow_special else self._encode(text).tolist()

    def _encode(self, text: str) -> np.ndarray:
        return self._run(self._plain, text)

    def _run(self, library: Any, text: str) -> np.ndarray:
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")  # half a pair is no text
        return np.array(library.encode(text, add_special_tokens=False).ids, dtype=np.uint32)

    def decode(self, ids: Any) -> str:
        """As Tokenizer.decode; a space that the encoding puts before a text is taken away again."""
        ids = list(ids)
        self.decode_bytes(ids)  # refuses ids out of range
        return self._whole.decode(ids, skip_special_tokens=True)

    def _content(self) -> dict:
        return self._files.content()

    def with_chat_template(self, template: str) -> Tokenizer:
        """As Tokenizer.with_chat_template."""
        return ForeignTokenizer(Files(self._files.tokenizer, self._files.config, template, self.eos_ids))

    def save(self, folder: str | Path) -> Path:
        """Write the files that it came from into an existing folder."""
        return self._files.write(Path(folder))


def _template(post_processor: dict | None, added: dict[str, int]) -> list[int]:
    """The special tokens that a post-processor puts before a text. Raises ValueError for one that adds some after."""
    steps = post_processor or {}
    steps = steps["processors"] if steps.get("type") == "Sequence" else [steps]
    before: list[int] = []
    for step in steps:
        if step.get("type") == "TemplateProcessing":
            whole = [next(iter(part)) for part in step["single"]]
            text = whole.index("Sequence")
            if text < len(whole) - 1:
                raise ValueError("its post-processor ends every text with a special token")
            before += [added[part["SpecialToken"]["id"]] for part in step["single"][:text]]
        elif step.get("type") not in (None, "ByteLevel"):
            raise ValueError(f"its post-processor is a {step.get('type')}")
    return before


def _piece_bytes(content: dict) -> Any:
    """What turns a piece of the vocabulary into its bytes. Raises ValueError for decoders that are not known."""
    kinds = re.findall(r'"type": ?"(\w+)"', json.dumps(content.get("decoder") or {}))
    if "ByteLevel" in kinds:
        return lambda piece: bytes(TO_BYTE[char] for char in piece) if set(piece) <= TO_BYTE.keys() else piece.encode()
    if {"Metaspace", "ByteFallback", "Replace"} & set(kinds):

        def from_sentencepiece(piece: str) -> bytes:
            number = re.fullmatch("<0x([0-9A-F]{2})>", piece)
            return bytes([int(number[1], 16)]) if number else piece.replace("▁", " ").encode()

        return from_sentencepiece
    raise ValueError(f"its decoder is {' of '.join(kinds) or 'missing'}; ByteLevel and Metaspace are known")


def _library(content: dict) -> Any:
    """The library's own object. Raises ValueError where it refuses the content."""
    try:
        import tokenizers
    except ImportError as error:
        raise UserError("tokenizers of Hugging Face folders need the library: pip install tokenizers") from error
    try:
        library = tokenizers.Tokenizer.from_str(json.dumps(content))
    except BaseException as error:  # the library raises plain Exceptions, and panics, which are none
        if not (type(error) is Exception or type(error).__name__ == "PanicException"):
            raise
        raise ValueError(f"the library tokenizers refuses it: {error}") from error
    library.no_truncation()
    library.no_padding()
    return library


def write_json(path: Path, content: dict) -> Path:
    """A JSON file, whole or not at all. Returns its path."""
    return replace_text(path, json.dumps(content, ensure_ascii=False, indent=1))


def replace_text(path: Path, text: str) -> Path:
    """A file of text, whole or not at all. Returns its path."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    return path
