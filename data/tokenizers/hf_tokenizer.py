"""Imported tokenizers that tiktoken cannot reproduce, run with the library `tokenizers`."""

import json
import re
import secrets
from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from thinker.data.tokenizers.text_growth import check_growth
from thinker.data.tokenizers.tokenizer import MAX_VOCAB, Span, Tokenizer, replace_surrogates
from thinker.runtime.errors import UserError
from thinker.runtime.files import atomic_write

FILE_NAME = "tokenizer.json"
CONFIG_NAME = "tokenizer_config.json"
TEMPLATE_NAME = "chat_template.jinja"

# Our own keys in tokenizer_config.json, for values that no other key stores or that model files may
# contradict.
EOS_KEY = "thinker_eos_ids"
ADD_BOS_KEY = "thinker_add_bos"
BOS_KEY = "thinker_bos_id"

FAST_CLASS = "PreTrainedTokenizerFast"  # of transformers: does what tokenizer.json says

EOS_FILES = "eos_token_id in generation_config.json or config.json"
SPECIAL = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)

# Flags of an added token, which decide where it is recognized.
FLAGS = ("single_word", "lstrip", "rstrip", "normalized")


def _bytes_to_characters() -> dict[int, str]:
    """The characters of bytes in a byte-level vocabulary, as GPT-2's bytes_to_unicode()."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]  # printable in Latin-1
    characters = {byte: chr(byte) for byte in plain}
    n_others = 0
    for byte in range(256):
        if byte not in characters:
            characters[byte] = chr(256 + n_others)
            n_others += 1
    return characters


TO_CHAR = _bytes_to_characters()
TO_BYTE = {char: byte for byte, char in TO_CHAR.items()}


class HFTokenizer(Tokenizer):
    """A tokenizer of the library `tokenizers` with the interface of Tokenizer.

    content, config: tokenizer.json and tokenizer_config.json.
    flags: name of an added token -> FLAGS -> bool.
    """

    def __init__(
        self,
        content: dict,
        config: dict,
        chat_template: str | None,
        eos_ids: list[int],
        bos_id: int | None,
        tokens_elsewhere: list[Any],
    ) -> None:
        """eos_ids, bos_id: from generation_config.json or config.json, if present.

        tokens_elsewhere: added tokens, as names or dictionaries, that files other than
        tokenizer.json declare. Raises ValueError for unsupported tokenizers. Does not call the base
        class, which builds a tiktoken encoding.
        """
        self.content = content
        self.config = config
        self.chat_template = chat_template
        self.kind = "hf"
        self.normalizer = None
        self.may_lose_text = True

        added = content.get("added_tokens") or []
        self._read_added_tokens(added)
        self._check(len(added), tokens_elsewhere)
        self.special_tokens_map = special_token_names(config)

        eos_token = self.special_tokens_map.get("eos_token")
        if not eos_ids and eos_token in self.special_tokens:
            eos_ids = [self.special_tokens[eos_token]]
        if not all(map(_is_id, self.special_tokens.values())):
            raise ValueError("an added token has an invalid id")
        if not all(map(_is_id, eos_ids)):
            raise ValueError(f"{eos_ids} are not valid EOS token ids ({EOS_FILES})")
        self.bos_token = self._find_bos_token(bos_id, eos_ids)
        if self.bos_token not in self.special_tokens or not eos_ids:
            raise ValueError("it has no BOS or EOS token")
        self.bos_id = self.special_tokens[self.bos_token]
        self.eos_ids = eos_ids
        self.eos_id = eos_ids[0]

        # Prompts start as the post-processor starts texts, or else as our own key says.
        self.bos_prefix = _template_prefix(content.get("post_processor"), self.special_tokens)
        if not self.bos_prefix and config.get(ADD_BOS_KEY) is True:
            self.bos_prefix = [self.bos_id]
        if self.bos_prefix not in ([], [self.bos_id]):
            raise ValueError("texts begin with more than one special token")
        self._load()

    def _read_added_tokens(self, added: list[dict]) -> None:
        """Set the ids and flags of added tokens."""
        self.special_tokens = {}
        self.non_special_added_tokens = []
        self.flags = {}
        for token in added:
            name = token["content"]
            self.special_tokens[str(name)] = token["id"]
            self.flags[name] = _flags(token)
            if not token.get("special"):
                self.non_special_added_tokens.append(name)

    def _find_bos_token(self, bos_id: int | None, eos_ids: list[int]) -> str | None:
        """The BOS token of the config, or of the model, or else an EOS token."""
        stated = self.special_tokens_map.get("bos_token")
        if stated:
            return stated
        for name, number in reversed(self.special_tokens.items()):
            if name and number == bos_id:
                return name
        for name, number in self.special_tokens.items():
            if name and number in eos_ids:
                return name
        return None

    def _check(self, n_added: int, tokens_elsewhere: list[Any]) -> None:
        """Raise ValueError if the library or transformers do not do what tokenizer.json states."""
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
            name = token
            if isinstance(token, dict):
                name = token.get("content")
            if name not in self.special_tokens:
                raise ValueError(f"it does not add the token {name!r} that other files declare")
            if isinstance(token, dict) and _flags(token) != self.flags[name]:
                raise ValueError(f"other files declare its token {name!r} with different flags")

    def _load(self) -> None:
        """Load the tokenizer that recognizes special tokens, and the bytes of all others.

        Raises ValueError if its vocabulary is wrong.
        """
        self._with_special = _library(self.content)
        # No text contains a secret name.
        secret = secrets.token_hex(16)
        self._secret_names: dict[str, str] = {}
        self._spaced: dict[int, bool] = {}  # by the id of a special token
        self._continuing: tuple[Any, Any] | None = None  # made when a text continues another
        for name, number in self.special_tokens.items():
            if name not in self.non_special_added_tokens:
                self._secret_names[name] = f"{secret} {number}"

        for name, number in self.special_tokens.items():
            if self._with_special.token_to_id(name) != number:
                raise ValueError(f"its token {name!r} has a different id in its vocabulary")
        vocab = _vocab(self.content["model"])
        self.vocab_size = 1 + max([*vocab.values(), *self.special_tokens.values()])
        if self.vocab_size > MAX_VOCAB:
            raise ValueError(
                f"its vocabulary of {self.vocab_size} is too large (maximum: {MAX_VOCAB})"
            )
        last_eos_id = max(self.eos_ids)
        if last_eos_id >= self.vocab_size:
            raise ValueError(
                f"its vocabulary of {self.vocab_size} does not contain EOS token {last_eos_id} "
                f"({EOS_FILES})"
            )

        to_bytes = _piece_to_bytes(self.content)
        self._added_bytes = {}
        for name in self.non_special_added_tokens:
            token = name.encode()
            if to_bytes is _bytes_of_sentencepiece:  # Gemma adds runs of ▁, which are spaces
                token = to_bytes(name)
            self._added_bytes[self.special_tokens[name]] = token
        self._tokens = [None] * self.vocab_size
        added_ids = set(self.special_tokens.values())
        for piece, number in vocab.items():
            if number not in added_ids:
                self._tokens[number] = to_bytes(piece)
        # The library ignores this key, but transformers may not.
        # allow_special, because making the library without special tokens takes a second or more.
        adds_space = self.decode_bytes(self.encode("a", allow_special=True)).startswith(b" ")
        stated = self.config.get("add_prefix_space")
        if stated not in (None, adds_space):
            raise ValueError(f"add_prefix_space is {stated}, but tokenizer.json does the opposite")

    @cached_property
    def _plain(self) -> Any:
        """The library that does not recognize special tokens, made when it is first needed."""
        return _library(_with_names(self.content, self._secret_names))

    def encode_array(
        self,
        text: str,
        allow_special: bool = False,
        *,
        literal: list[Span] | None = None,
        continues: bool = False,
    ) -> np.ndarray:
        """See Tokenizer.encode_array()."""
        text = replace_surrogates(text)
        if not allow_special:
            return self._encode_with(self._plain, text, continues)
        if literal is None or (not literal and not self._normalizes_names):
            return self._encode_with(self._with_special, text, continues)
        return self._encode_literal(text, literal, continues)

    def _encode_with(self, library: Any, text: str, continues: bool) -> np.ndarray:
        if continues:
            library = self._without_prefix(library)
        try:
            encoding = library.encode(text, add_special_tokens=False)
            return np.array(encoding.ids, dtype=np.uint32)
        except BaseException as error:
            if not _is_of_library(error):
                raise
            raise UserError(f"the tokenizer cannot encode {text[:40]!r}: {error}") from error

    def _encode_literal(self, text: str, literal: list[Span], continues: bool) -> np.ndarray:
        """Encode a text in which names of special tokens are plain text in some spans."""
        renamed, n_names = self._with_secret_names(text, literal)
        ids = self._encode_with(self._plain, renamed, continues)
        special = [self.special_tokens[name] for name in self._secret_names]
        if np.isin(ids, special).sum() >= n_names:
            return ids
        # A normalizer changes the secret names, as it does the others.
        if literal:
            raise UserError(
                "a message contains the name of a special token, which the normalizer of this "
                "tokenizer does not let us tell from the token; remove it"
            )
        return self._encode_with(self._with_special, text, continues)

    def cut_spans(self, text: str, literal: list[Span]) -> list[Span]:
        """See Tokenizer.cut_spans(). The library looks for these tokens first, and treats what is
        between them piece by piece."""
        spans = []
        for start, end in self._find_names(text, True, literal):
            flags = self.flags[text[start:end]]
            if not flags["normalized"] and not flags["single_word"]:
                spans.append((start, end))
        return spans

    def adds_space_after(self, token_id: int) -> bool:
        """See Tokenizer.adds_space_after(). True for special tokens of older SentencePiece models,
        which encode `</s>Yes` with a space that nobody wrote."""
        if token_id not in self._spaced:
            is_added = False
            for name, number in self.special_tokens.items():
                if number == token_id and name not in self.non_special_added_tokens:
                    ids = self.encode(name + "a", allow_special=True)
                    is_added = self.decode_bytes(ids).startswith(b" ")
            self._spaced[token_id] = is_added
        return self._spaced[token_id]

    @property
    def _normalizes_names(self) -> bool:
        """Whether a text that is not the name of a special token may be normalized to one."""
        if self.content.get("normalizer") is None:
            return False
        return any(self.flags[name]["normalized"] for name in self._secret_names)

    def _with_secret_names(self, text: str, literal: list[Span]) -> tuple[str, int]:
        """A text in which the names of special tokens, except in the spans `literal`, are those
        that the library self._plain knows; and the number of these names."""
        parts = []
        position = 0
        n_names = 0
        for start, end in self._find_names(text, True, literal):
            name = text[start:end]
            if self.flags[name]["single_word"]:
                raise UserError(
                    f"the name of a special token is in a message, and the tokenizer finds "
                    f"{name!r} only as a word of its own, so they cannot be told apart"
                )
            parts += [text[position:start], self._secret_names.get(name, name)]
            position = end
            n_names += name in self._secret_names
        return "".join([*parts, text[position:]]), n_names

    def _without_prefix(self, library: Any) -> Any:
        """The same library, but one that begins no text with a space."""
        if self._continuing is None:
            content = _without_prefix(self.content)
            if content == self.content:
                self._continuing = self._with_special, self._plain
            else:
                plain = _with_names(content, self._secret_names)
                self._continuing = _library(content), _library(plain)
        with_special, plain = self._continuing
        return plain if library is self._plain else with_special

    def decode(self, ids: Iterable[int]) -> str:
        """Like Tokenizer.decode(), without the space that encoding adds before a text."""
        ids = list(ids)
        self.decode_bytes(ids)  # raises for ids out of range
        return self._with_special.decode(ids, skip_special_tokens=True)

    def _content(self) -> dict:
        return {
            "tokenizer": self.content,
            "chat_template": self.chat_template,
            "bos_token": self.bos_token,
            "eos_ids": self.eos_ids,
            "add_bos": bool(self.bos_prefix),
            "special_tokens_map": self.special_tokens_map,
        }

    def stored_config(self) -> dict:
        """tokenizer_config.json, with what no other of its keys states.

        Its class is the one that follows tokenizer.json. Some other classes of transformers replace
        the normalizer and the split by their own.
        """
        config = {key: value for key, value in self.config.items() if key != "auto_map"}
        config.setdefault(
            "padding_side", "left"
        )  # generate() would continue after padding on the right
        own = {"tokenizer_class": FAST_CLASS, EOS_KEY: self.eos_ids, BOS_KEY: self.bos_id}
        return config | own

    def save(self, folder: str | Path) -> Path:
        """Write the Hugging Face files to an existing folder."""
        write_files(Path(folder), self.content, self.stored_config(), self.chat_template)
        return Path(folder) / FILE_NAME


def special_token_names(config: dict) -> dict[str, Any]:
    """The names of special tokens in tokenizer_config.json or special_tokens_map.json, which may
    also describe them."""
    names = {}
    for key in SPECIAL:
        name = config.get(key)
        if name is None:
            continue
        if isinstance(name, dict):
            name = name.get("content")
        names[key] = name
    return names


def _vocab(model: dict) -> dict[str, int]:
    """The ids of the pieces in the model of a tokenizer.json."""
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        return vocab
    return {piece: number for number, (piece, _) in enumerate(vocab)}  # Unigram lists them by id


def _flags(token: dict) -> dict[str, bool]:
    """The flags of an added token."""
    return {flag: bool(token.get(flag)) for flag in FLAGS}


def _is_id(number: Any) -> bool:
    """Whether a value from a file can be the id of a token."""
    return type(number) is int and 0 <= number < MAX_VOCAB


def write_files(folder: Path, content: dict, config: dict, chat_template: str | None) -> None:
    """Write tokenizer.json, tokenizer_config.json and the chat template, each atomically."""
    for name, values in ((CONFIG_NAME, config), (FILE_NAME, content)):
        atomic_write(folder / name, json.dumps(values, ensure_ascii=False, indent=1))
    if chat_template is not None:
        atomic_write(folder / TEMPLATE_NAME, chat_template)


def _without_prefix(content: dict) -> dict:
    """tokenizer.json without the steps that begin a text with a space."""

    def changed(step: dict | None, key: str) -> dict | None:
        if step is None:
            return None
        kind = step.get("type")
        if kind == "Prepend":
            return None
        if kind == "Sequence":
            steps = [changed(inner, key) for inner in step[key]]
            return step | {key: [inner for inner in steps if inner is not None]}
        if kind == "Metaspace" and "prepend_scheme" in step:
            return step | {"prepend_scheme": "never"}
        if "add_prefix_space" in step:
            return step | {"add_prefix_space": False}
        return step

    return content | {
        "normalizer": changed(content.get("normalizer"), "normalizers"),
        "pre_tokenizer": changed(content.get("pre_tokenizer"), "pretokenizers"),
    }


def _with_names(content: dict, new: dict[str, str]) -> dict:
    """Rename tokens in tokenizer.json; ids do not change."""
    model = dict(content["model"])
    unknown = model.get("unk_token")
    model["unk_token"] = new.get(unknown, unknown)
    if isinstance(model.get("vocab"), dict):
        model["vocab"] = {new.get(piece, piece): i for piece, i in model["vocab"].items()}
    else:  # a Unigram model lists its pieces by id
        model["vocab"] = [[new.get(piece, piece), score] for piece, score in model["vocab"]]
    if "merges" in model:
        merges = []
        for merge in model["merges"]:
            pair = pair_of(merge)
            if not new.keys() & {*pair, "".join(pair)}:
                merges.append(pair)
        model["merges"] = merges
    added = []
    for token in content["added_tokens"]:
        name = token["content"]
        added.append(token | {"content": new.get(name, name)})
    return content | {"model": model, "added_tokens": added, "post_processor": None}


def pair_of(merge: str | list[str]) -> tuple[str, ...]:
    """The two pieces of a merge, which older files separate by a space."""
    if isinstance(merge, str):
        merge = merge.split(" ")
    return tuple(merge)


def _template_prefix(post_processor: dict | None, added: dict[str, int]) -> list[int]:
    """Special tokens that a post-processor adds before a text.

    Raises ValueError if it adds some after the text.
    """
    steps = [post_processor or {}]
    if steps[0].get("type") == "Sequence":
        steps = steps[0]["processors"]
    prefix: list[int] = []
    for step in steps:
        kind = step.get("type")
        if kind == "TemplateProcessing":
            parts = step["single"]
            kinds = [next(iter(part), None) for part in parts]  # the only key of each
            text = kinds.index("Sequence")
            if text < len(kinds) - 1:
                raise ValueError("its post-processor ends every text with a special token")
            for part in parts[:text]:
                prefix.append(added[part["SpecialToken"]["id"]])
        elif kind not in (None, "ByteLevel"):
            raise ValueError(f"its post-processor {kind} is not supported")
    return prefix


def _piece_to_bytes(content: dict) -> Callable[[str], bytes]:
    """Return the function from a vocabulary piece to its bytes.

    Raises ValueError for an unknown decoder.
    """
    kinds = re.findall(r'"type": ?"(\w+)"', json.dumps(content.get("decoder") or {}))
    if "ByteLevel" in kinds:
        return _bytes_of_byte_level
    if not {"Metaspace", "ByteFallback", "Replace"} & set(kinds):
        found = " of ".join(kinds) or "missing"
        raise ValueError(f"its decoder is {found} (supported: ByteLevel, Metaspace)")
    return _bytes_of_sentencepiece


def unprinted(piece: str) -> bytes | None:
    """The bytes of a piece of a byte-level vocabulary, or None if it has other characters."""
    try:
        return bytes(map(TO_BYTE.__getitem__, piece))
    except KeyError:
        return None


def _bytes_of_byte_level(piece: str) -> bytes:
    token = unprinted(piece)
    if token is None:
        return piece.encode()
    return token


def _bytes_of_sentencepiece(piece: str) -> bytes:
    if piece.startswith("<0x"):
        byte = re.fullmatch("<0x([0-9A-F]{2})>", piece)
        if byte:
            return bytes([int(byte[1], 16)])
    return piece.replace("▁", " ").encode()


def _library(content: dict) -> Any:
    """Create the library's tokenizer. Raises ValueError if the library rejects the content."""
    import tokenizers

    try:
        library = tokenizers.Tokenizer.from_str(json.dumps(content, ensure_ascii=False))
    except BaseException as error:
        if not _is_of_library(error):
            raise
        raise ValueError(f"the tokenizers library rejects it: {error}") from error
    # A file may say otherwise, which would lose text without a word.
    library.no_truncation()
    library.no_padding()
    return library


def _is_of_library(error: BaseException) -> bool:
    """Whether the library raised the error.

    It raises a plain Exception, or a Rust panic, which is a BaseException.
    """
    return type(error) is Exception or type(error).__name__ == "PanicException"
