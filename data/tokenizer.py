"""Text to token ids and back, by tiktoken."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tiktoken

from thinker.runtime.errors import UserError
from thinker.runtime.files import atomic_write

FILE_NAME = "thinker-tokenizer.json"
FILE_FORMAT = 2
MAX_FILE_BYTES = 1 << 26  # o200k_base, the largest of tiktoken's own, takes 4 MB
MAX_VOCAB = 1 << 20
PIECE_CHARS = 1 << 16  # rustbpe's and tiktoken's regular expressions overflow their stack on a million spaces
PROBE = "A cat's 2 Émigrés,\n\n\tΩ 中文 🙂  \u200d x"  # every pattern must split it and lose nothing
BOS_TOKEN = "<|bos|>"
ONE_CHARACTER = r"(?s)."


class Tokenizer:
    """Text to token ids and back. Each id below `vocab_size` is a byte string, a special token, or unused (a gap).

    Special tokens stand for no text: `decode`, `decode_bytes` and `token_bytes` give nothing for them. Exceptions are
    `non_special_added_tokens`, which stand for their names and are recognized in any text.

    Attributes:
        kind: "byte", "char", "bpe", "tiktoken:NAME", or "hf" for an imported one.
        vocab_size: the largest id + 1.
        special_tokens: name -> id, of all added tokens.
        bos_token, bos_id: the token that begins every document, and so also ends the one before.
        eos_ids: the tokens that end a text; only the BOS token unless imported. eos_id: the first of them.
        bos_prefix: what a prompt begins with: [bos_id] or nothing.
        chat_template: the Jinja template that renders a conversation as text, or None.
        special_tokens_map: what the template calls bos_token, eos_token, ... -> their names.
        content_hash: sha256 of everything that decides how text is encoded, as 64 hexadecimal digits.
    """

    def __init__(
        self,
        kind: str,
        tokens: list[bytes | None],
        special_tokens: dict[str, int],
        bos_token: str = BOS_TOKEN,
        pattern: str = ONE_CHARACTER,
        *,
        eos_ids: list[int] | None = None,
        add_bos: bool = True,
        non_special_added_tokens: list[str] | None = None,
        normalizer: str | None = None,
        chat_template: str | None = None,
        special_tokens_map: dict[str, str] | None = None,
    ) -> None:
        """
        Args:
            tokens: the bytes of each id, None for a special token or a gap.
            pattern: the regular expression that splits text before merging.
            add_bos: whether prompts begin with the BOS token.
            normalizer: applied to text first: "NFC" or None.

        Raises ValueError if these do not make a tokenizer that can encode every text.
        """
        ranks = {token: i for i, token in enumerate(tokens) if token is not None}
        if not 256 <= len(tokens) <= MAX_VOCAB or any(bytes([b]) not in ranks for b in range(256)) or b"" in ranks:
            raise ValueError("the tokens must hold all 256 bytes, no empty string, and at most 2**20 entries")
        if len(ranks) != sum(token is not None for token in tokens):
            raise ValueError("two ids have the same bytes")
        ids = list(special_tokens.values())
        if any(not 0 <= i < len(tokens) or tokens[i] is not None for i in ids):  # two names may share an id
            raise ValueError("a special token's id is out of range, or belongs to an ordinary token")
        if bos_token not in special_tokens or "" in special_tokens:
            raise ValueError("the BOS token is not a special token, or a special token has no name")
        if tokens[-1] is None and len(tokens) - 1 not in ids:
            raise ValueError("the last id is neither a token nor special")
        eos_ids = [special_tokens[bos_token]] if eos_ids is None else eos_ids
        if not eos_ids or any(type(i) is not int or not 0 <= i < len(tokens) for i in eos_ids):
            raise ValueError("an EOS token is missing or out of range")
        self.non_special_added_tokens = non_special_added_tokens or []
        if normalizer not in (None, "NFC") or not all(
            isinstance(name, str) and name in special_tokens for name in self.non_special_added_tokens
        ):
            raise ValueError("the normalizer is not NFC, or a non-special added token is not an added token")
        self.kind = kind
        self.pattern = pattern
        self.bos_token = bos_token
        self.special_tokens = dict(special_tokens)
        self.vocab_size = len(tokens)
        self.bos_id = special_tokens[bos_token]
        self.eos_ids, self.eos_id = eos_ids, eos_ids[0]
        self.bos_prefix = [self.bos_id] if add_bos else []
        self.normalizer = normalizer
        self.chat_template = chat_template
        if special_tokens_map is None:
            names = {number: name for name, number in special_tokens.items()}
            special_tokens_map = {"bos_token": bos_token, "eos_token": names.get(self.eos_id, bos_token)}
        self.special_tokens_map = special_tokens_map
        self._added_bytes = {special_tokens[name]: name.encode() for name in self.non_special_added_tokens}
        self._tokens = tokens
        self._encoding = tiktoken.Encoding(
            kind, pat_str=pattern, mergeable_ranks=ranks, special_tokens=self.special_tokens
        )

    def with_chat_template(self, template: str) -> Tokenizer:
        """A copy with another chat template."""
        content = self._content() | {"chat_template": template}
        return Tokenizer._from_content(content | {"sha256": _hash(content)})

    def encode(self, text: str, allow_special: bool = False) -> list[int]:
        """The ids of a text, without a BOS token. Names of special tokens are plain text unless allow_special."""
        names = list(self.special_tokens) if allow_special else self.non_special_added_tokens
        return self._encode_with_names(text, names).tolist()

    def _encode_with_names(self, text: str, names: list[str]) -> np.ndarray:
        """The ids of a text in which these names stand for their tokens."""
        if not names:
            return self._encode(text)
        alternatives = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
        parts = [
            np.array([self.special_tokens[part]], np.uint32) if i % 2 else self._encode(part)
            for i, part in enumerate(re.split(f"({alternatives})", text))
        ]
        return np.concatenate(parts)

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        """The ids of many texts, encoded in threads; special names are plain text. Each a 1-D array of uint32."""
        names = self.non_special_added_tokens
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            return list(pool.map(lambda text: self._encode_with_names(text, names), texts))

    def _encode(self, text: str) -> np.ndarray:
        try:
            if self.normalizer is not None:
                from tokenizers import normalizers  # its Unicode tables are those the model was trained with

                text = normalizers.NFC().normalize_str(text)
            return self._encoding.encode_to_numpy(text, disallowed_special=())
        except UnicodeEncodeError:  # a lone surrogate is not text: it becomes U+FFFD
            return self._encode(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))
        except ValueError:  # a run of a million spaces overflows the stack of tiktoken's regular expressions
            if len(text) < PIECE_CHARS:
                raise
            half = len(text) // 2
            return np.concatenate([self._encode(text[:half]), self._encode(text[half:])])
        except BaseException as error:  # a Rust panic is not an Exception
            if type(error).__name__ != "PanicException":
                raise
            raise UserError(f"the tokenizer's pattern {self.pattern[:80]!r} cannot split every text") from error

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids; invalid UTF-8 becomes U+FFFD. Raises ValueError for an id out of range."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The bytes of ids, concatenated. Raises ValueError for an id out of range."""
        return b"".join(map(self.token_bytes, ids))

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one id: b"" for a special token or a gap. Raises ValueError for an id out of range."""
        if not 0 <= token_id < self.vocab_size:
            raise ValueError(f"token id {token_id} is outside the vocabulary of {self.vocab_size}")
        return self._tokens[token_id] or self._added_bytes.get(token_id, b"")

    @cached_property
    def content_hash(self) -> str:
        """sha256 of the content of the file."""
        return _hash(self._content())

    def _content(self) -> dict[str, Any]:
        return {
            "format": FILE_FORMAT,
            "kind": self.kind,
            "pattern": self.pattern,
            "bos_token": self.bos_token,
            "special_tokens": self.special_tokens,
            "tokens": [None if token is None else base64.b64encode(token).decode() for token in self._tokens],
            "eos_ids": self.eos_ids,
            "add_bos": bool(self.bos_prefix),
            "non_special_added_tokens": self.non_special_added_tokens,
            "normalizer": self.normalizer,
            "chat_template": self.chat_template,
            "special_tokens_map": self.special_tokens_map,
        }

    def save(self, folder: str | Path) -> Path:
        """Write `thinker-tokenizer.json` into an existing folder (to a temporary name, then renamed)."""
        path = Path(folder) / FILE_NAME
        atomic_write(path, json.dumps({**self._content(), "sha256": self.content_hash}, indent=0))
        return path

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """Read what save() wrote; path is the folder or the file. Raises UserError if the file is damaged."""
        path = Path(path)
        path = path / FILE_NAME if path.is_dir() else path
        try:
            if path.stat().st_size > MAX_FILE_BYTES:
                raise ValueError("it is larger than any tokenizer")
            return cls._from_content(json.loads(path.read_bytes()))
        except OSError as error:
            raise UserError(f"cannot read a tokenizer from {path}: {error.strerror}") from error
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path} is not a valid {FILE_NAME}: {error}") from error

    @classmethod
    def _from_content(cls, content: Any) -> Tokenizer:
        if not isinstance(content, dict) or content.get("format") != FILE_FORMAT:
            found = content.get("format") if isinstance(content, dict) else None
            raise ValueError(f"it has format {found}, and this version reads format {FILE_FORMAT}")
        content = dict(content)
        stated_hash = content.pop("sha256", None)
        types = {
            "format": int,
            "kind": str,
            "pattern": str,
            "bos_token": str,
            "special_tokens": dict,
            "tokens": list,
            "eos_ids": list,
            "add_bos": bool,
            "non_special_added_tokens": list,
            "normalizer": str | None,
            "chat_template": str | None,
            "special_tokens_map": dict,
        }
        if content.keys() != types.keys() or any(not isinstance(content[key], types[key]) for key in types):
            raise ValueError(f"its keys must be {', '.join(types)} and sha256, each of its type")
        if any(type(i) is not int for i in content["special_tokens"].values()):
            raise ValueError("an id of special_tokens is not an integer")
        if not all(isinstance(name, str) for name in content["special_tokens_map"].values()):
            raise ValueError("a name in special_tokens_map is not a string")
        if not all(isinstance(token, str | None) for token in content["tokens"]):
            raise ValueError("an entry of tokens is neither base64 nor null")
        if _hash(content) != stated_hash:
            raise ValueError("its content does not match its sha256")
        del content["format"]
        tokens = [None if token is None else base64.b64decode(token, validate=True) for token in content.pop("tokens")]
        tokenizer = cls(tokens=tokens, **content)
        if tokenizer.decode(tokenizer.encode(PROBE)) != PROBE:
            raise ValueError("its pattern loses text")
        return tokenizer


def _hash(content: dict) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def token_byte_lengths(tokenizer: Tokenizer) -> np.ndarray:
    """(vocab_size,) int64: bytes of text per token id; 0 for special tokens and gaps."""
    return np.array([len(tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size)], dtype=np.int64)
