"""Tokenizers based on tiktoken."""

from __future__ import annotations

import base64
import copy
import functools
import hashlib
import json
import re
from bisect import bisect_right
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tiktoken

from thinker.runtime.errors import UserError
from thinker.runtime.reading import read_json

FILE_NAME = "thinker-tokenizer.json"
FILE_FORMAT = 2
MAX_VOCAB = 1 << 20
PIECE_CHARS = 1 << 16  # on a million spaces, regular expressions in Rust overflow their stack
PROBE = "A cat's 2 Émigrés,\n\n\tΩ 中文 🙂  \u200d x"  # every pattern must split it without loss
BOS_TOKEN = "<|bos|>"
ONE_CHARACTER = r"(?s)."
NOTHING = r"(?!)"  # a regular expression that matches no text
SINGLE_BYTES = [bytes([b]) for b in range(256)]

Span = tuple[int, int]  # the first character, and the one after the last


class Tokenizer:
    """Convert text to token ids and back.

    Each id below `vocab_size` is a byte string, a special token or a gap. Special tokens have no
    text: `decode`, `decode_bytes` and `token_bytes` skip them. The exception are
    `non_special_added_tokens`, whose text is their name and which are recognized in any text.

    Attributes:
        kind: "byte", "char", "bpe", "tiktoken:NAME", or "hf" for an imported one.
        vocab_size: the largest id + 1.
        special_tokens: name -> id, of all added tokens.
        bos_token, bos_id: the token that starts every document and so ends the previous document.
        eos_ids: tokens that end a text; only the BOS token unless imported.
        eos_id: the first EOS token.
        bos_prefix: ids at the start of a prompt: [bos_id] or [].
        chat_template: the Jinja template that renders a conversation as text, or None.
        special_tokens_map: bos_token, eos_token, ... in the template -> name of the token.
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
        """tokens: the bytes of each id, None for a special token or a gap.

        pattern: regular expression that splits text before merging. add_bos: start prompts with the
        BOS token. normalizer: "NFC" or None, applied to text first. Raises ValueError if some text
        could not be encoded.
        """
        ranks = {token: i for i, token in enumerate(tokens) if token is not None}
        _check_tokens(tokens, ranks)
        _check_special_tokens(special_tokens, bos_token, tokens)
        self.kind = kind
        self.pattern = pattern
        self.normalizer = normalizer
        self.may_lose_text = normalizer is not None
        self.chat_template = chat_template
        self.vocab_size = len(tokens)
        self._tokens = tokens
        self.special_tokens = dict(special_tokens)
        self.non_special_added_tokens = non_special_added_tokens or []

        self.bos_token = bos_token
        self.bos_id = special_tokens[bos_token]
        self.bos_prefix = [self.bos_id] if add_bos else []
        if eos_ids is None:
            eos_ids = [self.bos_id]
        if not eos_ids or not all(type(i) is int and 0 <= i < len(tokens) for i in eos_ids):
            raise ValueError("an EOS token is missing or out of range")
        self.eos_ids = eos_ids
        self.eos_id = eos_ids[0]

        # Templates name their tokens; without a map they get ours.
        if special_tokens_map is None:
            special_tokens_map = {"bos_token": bos_token, "eos_token": self._eos_token()}
        self.special_tokens_map = special_tokens_map
        self._check_names()

        self._added_bytes = {}
        for name in self.non_special_added_tokens:
            self._added_bytes[special_tokens[name]] = name.encode()
        self._encoding = tiktoken.Encoding(
            kind, pat_str=pattern, mergeable_ranks=ranks, special_tokens=self.special_tokens
        )

    def _eos_token(self) -> str:
        """The name of the first EOS token: the last of its names, or else that of the BOS token."""
        eos_token = self.bos_token
        for name, number in self.special_tokens.items():
            if number == self.eos_id:
                eos_token = name
        return eos_token

    def _check_names(self) -> None:
        """Raise ValueError for an unknown normalizer or name, or for one that is not a string."""
        names_are_known = all(name in self.special_tokens for name in self.non_special_added_tokens)
        if self.normalizer not in (None, "NFC") or not names_are_known:
            raise ValueError(
                "the normalizer is not NFC, or non_special_added_tokens has an unknown name"
            )
        texts = [self.kind, *self.special_tokens_map.values()]
        if self.chat_template is not None:
            texts.append(self.chat_template)
        if not all(isinstance(text, str) for text in texts):
            raise ValueError(
                "its kind, chat template or a name in special_tokens_map is not a string"
            )

    def __repr__(self) -> str:
        facts = f"{self.kind}, {self.vocab_size:,} ids, BOS {self.bos_token!r}"
        return f"{type(self).__name__}({facts})"

    def with_chat_template(self, template: str) -> Tokenizer:
        """Return a copy with another chat template."""
        other = copy.copy(self)
        other.chat_template = template
        vars(other).pop("content_hash", None)
        return other

    def with_eos(self, token_id: int) -> Tokenizer:
        """Return a copy in which one more token ends texts."""
        other = copy.copy(self)
        other.eos_ids = [*self.eos_ids, token_id]
        vars(other).pop("content_hash", None)
        return other

    def with_written_names(self, names: Iterable[str]) -> Tokenizer:
        """Return a copy that decodes these special tokens as their names, for reading an answer."""
        other = copy.copy(self)
        other._added_bytes = dict(self._added_bytes)
        for name in names:
            other._added_bytes[self.special_tokens[name]] = name.encode()
        return other

    def encode(
        self, text: str, allow_special: bool = False, *, continues: bool = False
    ) -> list[int]:
        """Encode a text without a BOS token.

        Names of special tokens are plain text unless allow_special is set. continues: the text
        follows other text, so a tokenizer that begins each text with a space adds none.
        """
        return self.encode_array(text, allow_special, continues=continues).tolist()

    def encode_array(
        self,
        text: str,
        allow_special: bool = False,
        *,
        literal: list[Span] | None = None,
        continues: bool = False,
    ) -> np.ndarray:
        """Encode a text to a 1-D array of uint32; see encode().

        literal: with allow_special, spans of the text in which names of special tokens are plain
        text. Between special tokens, the text is encoded as a whole.
        """
        ids = []
        position = 0
        for start, end in self._find_names(text, allow_special, literal):
            ids.append(self._encode(text[position:start]))
            ids.append(np.array([self.special_tokens[text[start:end]]], np.uint32))
            position = end
        ids.append(self._encode(text[position:]))
        return np.concatenate(ids)

    def adds_space_after(self, token_id: int) -> bool:
        """Whether encoding adds a space to the text behind this special token."""
        return False

    def cut_spans(self, text: str, literal: list[Span]) -> list[Span]:
        """The spans of added tokens before which a text can be cut: the tokens of its beginning and
        of its rest, encoded alone, are those of the whole.

        literal: as in encode_array().
        """
        return self._find_names(text, True, literal)

    def _find_names(self, text: str, allow_special: bool, literal: list[Span] | None) -> list[Span]:
        """The spans of the names of tokens in a text."""
        names = self.non_special_added_tokens
        if allow_special:
            names = list(self.special_tokens)
        pattern = any_name(names)
        literal = sorted(literal or [])
        found = []
        position = 0
        while match := pattern.search(text, position):
            start = match.start()
            position = start + 1
            # The longest name there that is not literal.
            fitting = [name for name in names if text.startswith(name, start)]
            for name in sorted(fitting, key=len, reverse=True):
                span = start, start + len(name)
                if name in self.non_special_added_tokens or not _overlaps(span, literal):
                    found.append(span)
                    position = span[1]
                    break
        return found

    def _encode(self, text: str) -> np.ndarray:
        """Encode a text without names of tokens."""
        try:
            if self.normalizer is not None:
                # Its Unicode tables are those that the model was trained with.
                from tokenizers import normalizers

                text = normalizers.NFC().normalize_str(text)
            return self._encoding.encode_to_numpy(text, disallowed_special=())
        except UnicodeEncodeError:
            return self._encode(replace_surrogates(text))
        except ValueError:  # a million spaces overflow the stack of tiktoken's regular expressions
            if len(text) < PIECE_CHARS:
                raise
            # Each half is encoded by itself. That changes tokens only at the cut.
            half = len(text) // 2
            return np.concatenate([self._encode(text[:half]), self._encode(text[half:])])
        except BaseException as error:  # a Rust panic is not an Exception
            if type(error).__name__ != "PanicException":
                raise
            raise UserError(
                f"the tokenizer's pattern {self.pattern[:80]!r} cannot split the text"
            ) from error

    def decode(self, ids: Iterable[int]) -> str:
        """Decode ids to text; invalid UTF-8 becomes U+FFFD.

        Raises ValueError for an id out of range.
        """
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """Decode ids to bytes. Raises ValueError for an id out of range."""
        return b"".join(map(self.token_bytes, ids))

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one id, b"" for a special token or a gap.

        Raises ValueError for an id out of range.
        """
        if not 0 <= token_id < self.vocab_size:
            raise ValueError(f"token id {token_id} is outside the vocabulary of {self.vocab_size}")
        return self._tokens[token_id] or self._added_bytes.get(token_id, b"")

    @cached_property
    def content_hash(self) -> str:
        """sha256, in 64 hexadecimal digits, of everything that affects how text is encoded."""
        text = json.dumps(self._content(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def _content(self) -> dict[str, Any]:
        """What is in the file."""
        tokens: list[str | None] = []
        for token in self._tokens:
            if token is None:
                tokens.append(None)
            else:
                tokens.append(base64.b64encode(token).decode())
        return {
            "format": FILE_FORMAT,
            "kind": self.kind,
            "pattern": self.pattern,
            "bos_token": self.bos_token,
            "special_tokens": self.special_tokens,
            "tokens": tokens,
            "eos_ids": self.eos_ids,
            "add_bos": bool(self.bos_prefix),
            "non_special_added_tokens": self.non_special_added_tokens,
            "normalizer": self.normalizer,
            "chat_template": self.chat_template,
            "special_tokens_map": self.special_tokens_map,
        }

    def save(self, folder: str | Path) -> Path:
        """Write `thinker-tokenizer.json` to an existing folder, atomically."""
        # Imported here, as most commands only read a tokenizer.
        from thinker.runtime.files import atomic_write

        path = Path(folder) / FILE_NAME
        content = self._content() | {"sha256": self.content_hash}
        atomic_write(path, json.dumps(content, indent=0))
        return path

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """Load a saved tokenizer from its folder or file.

        Raises UserError if the file is damaged.
        """
        path = Path(path)
        if path.is_dir():
            path = path / FILE_NAME
        content = read_json(path)
        version = content.pop("format", None)
        stated_hash = content.pop("sha256", None)
        try:
            if version != FILE_FORMAT:
                raise ValueError(
                    f"it has format {version}, but this version reads format {FILE_FORMAT}"
                )
            tokens: list[bytes | None] = []
            for text in content.pop("tokens"):
                if text is None:
                    tokens.append(None)
                else:
                    tokens.append(base64.b64decode(text, validate=True))
            tokenizer = cls(tokens=tokens, **content)
            if tokenizer.content_hash != stated_hash:  # also detects missing keys and wrong types
                raise ValueError("its content does not match its sha256")
            if tokenizer.decode(tokenizer.encode(PROBE)) != PROBE:
                raise ValueError("its pattern loses text")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise UserError(f"{path} is not a valid {FILE_NAME}: {error}") from error
        return tokenizer


@functools.lru_cache(16)
def _name_pattern(names: tuple[str, ...]) -> re.Pattern[str]:
    # Where one name begins with another, the longer one is meant, as in tiktoken.
    longest_first = sorted(names, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or NOTHING)


def any_name(names: Iterable[str]) -> re.Pattern[str]:
    """A regular expression that finds names of tokens in a text."""
    return _name_pattern(tuple(names))


def _overlaps(span: Span, others: list[Span]) -> bool:
    """Whether a span has a character of others, which are sorted and do not overlap."""
    start, end = span
    number = bisect_right(others, start, key=lambda other: other[1])  # the first that ends later
    return number < len(others) and others[number][0] < end


def _check_tokens(tokens: list[bytes | None], ranks: dict[bytes, int]) -> None:
    """Raise ValueError if the ordinary tokens, whose ids are `ranks`, cannot encode all texts."""
    n_ordinary = len(tokens) - tokens.count(None)
    are_distinct = len(ranks) == n_ordinary and b"" not in ranks
    has_all_bytes = set(SINGLE_BYTES) <= ranks.keys()
    if not are_distinct or not has_all_bytes or len(tokens) > MAX_VOCAB:
        raise ValueError(
            "the tokens must be distinct, non-empty, at most 2**20, and include all 256 bytes"
        )


def _check_special_tokens(
    special_tokens: dict[str, int], bos_token: str, tokens: list[bytes | None]
) -> None:
    """Raise ValueError if an id is not free, or a name is missing. Two names may share an id."""
    ids = list(special_tokens.values())
    if not all(0 <= i < len(tokens) and tokens[i] is None for i in ids):
        raise ValueError(
            "the id of a special token is out of range or belongs to an ordinary token"
        )
    ends_with_gap = tokens[-1] is None and len(tokens) - 1 not in ids
    if bos_token not in special_tokens or "" in special_tokens or ends_with_gap:
        raise ValueError(
            "the BOS token or the last id has no token, or a special token has no name"
        )


def replace_surrogates(text: str) -> str:
    """Replace lone surrogates, which UTF-8 cannot encode, by U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
