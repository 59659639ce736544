"""Text to token ids and back: one class around tiktoken."""

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

import numpy as np
import tiktoken

from thinker.runtime.errors import UserError

FILE_NAME = "thinker-tokenizer.json"
FILE_FORMAT = 2
MAX_FILE_BYTES = 1 << 26  # o200k_base, the largest of tiktoken's own, takes 4 MB
MAX_VOCAB = 1 << 20
PIECE_CHARS = 1 << 16  # rustbpe's regular expressions overflow their stack on a run of a million spaces

PROBE = "A cat's 2 Émigrés,\n\n\tΩ 中文 🙂  \u200d x"  # any pattern must cut it, and lose nothing

BOS_TOKEN = "<|bos|>"
ONE_CHARACTER = r"(?s)."


class Tokenizer:
    """Token ids for text. Every id below `vocab_size` is a string of bytes, a special token or (a gap) nothing.

    Attributes:
        kind: "byte", "char", "bpe", "tiktoken:NAME", or "hf" for one that came from elsewhere.
        vocab_size: the largest id + 1.
        special_tokens: name -> id.
        bos_id: the bos_token token, which begins every document and so also ends the one before.
        eos_ids: tokens that end a text; for tokenizers made here the bos_token alone. eos_id: the first of them.
        bos_prefix: what a prompt begins with: the bos_token, or nothing.
        chat_template: how a conversation becomes text (Jinja), or None. named: what it calls bos_token, eos_token, ...
        content_hash: sha256 of everything that decides how text is encoded, as 64 hexadecimal digits.

    Special tokens stand for no text: `decode`, `decode_bytes` and `token_bytes` give nothing for them, unless they
    are `non_special_added_tokens`: those stand for their names, and are found by them in any text.
    """

    chat_template: str | None = None

    def __init__(
        self,
        kind: str,
        tokens: list[bytes | None],
        special_tokens: dict[str, int],
        bos_token: str = BOS_TOKEN,
        pattern: str = ONE_CHARACTER,
        *,
        eos: list[int] | None = None,
        add_bos: bool = True,
        non_special_added_tokens: list[str] | None = None,
        normalizer: str | None = None,
        chat_template: str | None = None,
        named: dict[str, str] | None = None,
    ) -> None:
        """Args: tokens: the bytes of each id, None for a special token or a gap; pattern: what cuts text into pieces;
        begins: whether prompts begin with the bos_token; normalizer: what text goes through before, NFC or nothing.

        Raises ValueError where these do not make a tokenizer that can encode every text.
        """
        ranks = {token: i for i, token in enumerate(tokens) if token is not None}
        if not 256 <= len(tokens) <= MAX_VOCAB or any(bytes([b]) not in ranks for b in range(256)) or b"" in ranks:
            raise ValueError("the tokens must hold all 256 bytes, no empty string, and at most 2**20 entries")
        if len(ranks) != sum(token is not None for token in tokens):
            raise ValueError("two ids have the same bytes")
        ids = list(special_tokens.values())
        if any(not 0 <= i < len(tokens) or tokens[i] is not None for i in ids):  # o200k_harmony has two names for one
            raise ValueError("a special token's id is out of range or a token's")
        if bos_token not in special_tokens or "" in special_tokens:
            raise ValueError("the bos_token is no special token, or one has no name")
        if tokens[-1] is None and len(tokens) - 1 not in ids:
            raise ValueError("the last id is neither a token nor special")
        eos = [special_tokens[bos_token]] if eos is None else eos
        if not eos or any(type(i) is not int or not 0 <= i < len(tokens) for i in eos):
            raise ValueError("a token that ends a text is out of range")
        if normalizer not in (None, "NFC") or not set(non_special_added_tokens or []) <= special_tokens.keys():
            raise ValueError("its normalizer is not NFC, or a non_special_added_tokens token is not special")
        self.kind = kind
        self.pattern = pattern
        self.bos_token = bos_token
        self.special_tokens = dict(special_tokens)
        self.vocab_size = len(tokens)
        self.bos_id = special_tokens[bos_token]
        self.eos_ids, self.eos_id = eos, eos[0]
        self.bos_prefix = [self.bos_id] if add_bos else []
        self.non_special_added_tokens, self.normalizer, self.chat_template = (
            non_special_added_tokens or [],
            normalizer,
            chat_template,
        )
        self.named = self._default_names() if named is None else named
        self._names = {special_tokens[name]: name.encode() for name in self.non_special_added_tokens}
        self._tokens = tokens
        self._encoding = tiktoken.Encoding(
            kind, pat_str=pattern, mergeable_ranks=ranks, special_tokens=self.special_tokens
        )

    def _default_names(self) -> dict[str, str]:
        names = {number: name for name, number in self.special_tokens.items()}
        return {"bos_token": self.bos_token, "eos_token": names.get(self.eos_id, self.bos_token)}

    def with_chat_template(self, template: str) -> Tokenizer:
        """The same with another template for conversations."""
        content = self._content() | {"chat_template": template}
        return Tokenizer._from_content(content | {"sha256": _hash(content)})

    def encode(self, text: str, allow_special: bool = False) -> list[int]:
        """The ids of a text, without a bos_token token.

        The name of a special token within the text is plain text like any other, unless allow_special.
        """
        return self._cut(text, list(self.special_tokens) if allow_special else self.non_special_added_tokens).tolist()

    def _cut(self, text: str, names: list[str]) -> np.ndarray:
        """Ids of a text in which these names stand for their tokens."""
        if not names:
            return self._encode(text)
        either = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
        parts = [
            np.array([self.special_tokens[part]], np.uint32) if i % 2 else self._encode(part)
            for i, part in enumerate(re.split(f"({either})", text))
        ]
        return np.concatenate(parts)

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        """The ids of many texts, in threads; special names are plain text. Each a 1-D array of uint32."""
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            return list(pool.map(lambda text: self._cut(text, self.non_special_added_tokens), texts))

    def _encode(self, text: str) -> np.ndarray:
        try:
            if self.normalizer is not None:
                from tokenizers import normalizers  # whose tables are those of the model's training

                text = normalizers.NFC().normalize_str(text)
            return self._encoding.encode_to_numpy(text, disallowed_special=())
        except UnicodeEncodeError:  # half of a surrogate pair is no text: it becomes U+FFFD
            return self._encode(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))
        except ValueError:  # a run of a million spaces overflows the stack of tiktoken's regular expressions
            if len(text) < PIECE_CHARS:
                raise
            half = len(text) // 2
            return np.concatenate([self._encode(text[:half]), self._encode(text[half:])])
        except BaseException as error:  # Rust's panics are no Exceptions
            if type(error).__name__ != "PanicException":
                raise
            raise UserError(f"the tokenizer's pattern {self.pattern[:80]!r} cannot cut every text") from error

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids; bytes that are no UTF-8 become U+FFFD. Raises ValueError for an id out of range."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The bytes of ids, one after the other. Raises ValueError for an id out of range."""
        return b"".join(map(self.token_bytes, ids))

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one id: b"" for a special token or a gap. Raises ValueError for an id out of range."""
        if not 0 <= token_id < self.vocab_size:
            raise ValueError(f"token id {token_id} is outside the vocabulary of {self.vocab_size}")
        return self._tokens[token_id] or self._names.get(token_id, b"")

    @cached_property
    def content_hash(self) -> str:
        """See the class."""
        return _hash(self._content())

    def _content(self) -> dict:
        tokens = [None if token is None else base64.b64encode(token).decode() for token in self._tokens]
        content = {
            "format": FILE_FORMAT,
            "kind": self.kind,
            "pattern": self.pattern,
            "bos_token": self.bos_token,
            "special_tokens": self.special_tokens,
            "tokens": tokens,
        }
        only_elsewhere = {  # than in tokenizers made here
            "eos": self.eos_ids if self.eos_ids != [self.bos_id] else None,
            "add_bos": None if self.bos_prefix else False,
            "non_special_added_tokens": self.non_special_added_tokens or None,
            "normalizer": self.normalizer,
            "chat_template": self.chat_template,
            "named": self.named if self.named != self._default_names() else None,
        }
        return content | {name: value for name, value in only_elsewhere.items() if value is not None}

    def save(self, folder: str | Path) -> Path:
        """Write `thinker-tokenizer.json` into an existing folder (to a temporary name, then renamed)."""
        path = Path(folder) / FILE_NAME
        temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump({**self._content(), "sha256": self.content_hash}, file, indent=0)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        return path

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """Read what save() wrote; path is the folder or the file. Raises UserError where it is not whole and ours."""
        path = Path(path)
        path = path / FILE_NAME if path.is_dir() else path
        try:
            if path.stat().st_size > MAX_FILE_BYTES:
                raise ValueError("it is larger than any tokenizer")
            return cls._from_content(json.loads(path.read_bytes()))
        except OSError as error:
            raise UserError(f"cannot read a tokenizer from {path}: {error.strerror}") from error
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path} is not a whole {FILE_NAME}: {error}") from error

    @classmethod
    def _from_content(cls, content: object) -> Tokenizer:
        if not isinstance(content, dict) or content.get("format") != FILE_FORMAT:
            raise ValueError(f"it does not say format {FILE_FORMAT}")
        found_hash = content.pop("sha256", None)
        types = {"kind": str, "pattern": str, "bos_token": str, "special_tokens": dict, "tokens": list}
        optional = {
            "eos": list,
            "add_bos": bool,
            "non_special_added_tokens": list,
            "normalizer": str,
            "chat_template": str,
        }
        optional |= {"named": dict}
        found, every = content.keys() - {"format"}, types | optional
        if not types.keys() <= found <= every.keys() or any(not isinstance(content[k], every[k]) for k in found):
            raise ValueError(f"its keys must be format, {', '.join(types)} and sha256, each of its type")
        if any(type(i) is not int for i in content["special_tokens"].values()):
            raise ValueError("an id of special_tokens is no integer")
        if not all(isinstance(name, str) for name in content.get("named", {}).values()):
            raise ValueError("a name in named is no text")
        if any(token is not None and not isinstance(token, str) for token in content["tokens"]):
            raise ValueError("an entry of tokens is neither base64 nor null")
        if _hash(content) != found_hash:
            raise ValueError("its content does not have the sha256 it states")
        del content["format"]
        tokens = [None if token is None else base64.b64decode(token, validate=True) for token in content.pop("tokens")]
        tokenizer = cls(tokens=tokens, **content)
        if tokenizer.decode(tokenizer.encode(PROBE)) != PROBE:
            raise ValueError("its pattern loses text")
        return tokenizer


def _hash(content: dict) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def token_byte_lengths(tokenizer: Tokenizer) -> np.ndarray:
    """(vocab_size,) int64: how many bytes of text each id stands for; 0 for special tokens and gaps."""
    return np.array([len(tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size)], dtype=np.int64)
