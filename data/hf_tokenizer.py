"""Tokenizers that are run through the library `tokenizers`: those that tiktoken cannot follow."""

from __future__ import annotations

import json
import os
import re
import secrets
from pathlib import Path
from typing import Any

import numpy as np

from thinker.data.tokenizer import MAX_VOCAB, Tokenizer
from thinker.runtime.errors import UserError

FILE_NAME, CONFIG_NAME, TEMPLATE_NAME = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
# In a tokenizer_config.json of ours: what ends a text, in a run, where no model's file says so; and whether prompts
# begin with the boundary.
EOS_KEY, ADD_BOS_KEY, BOS_KEY = "thinker_eos_ids", "thinker_add_bos", "thinker_bos_id"
SPECIAL = [f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")]  # those with a name
FLAGS = ("lstrip", "rstrip", "single_word", "normalized")  # of an added token, what decides where it is found


def _printable() -> dict[int, str]:
    """byte -> the character that stands for it in a byte-level vocabulary (GPT-2's encoder)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {byte: chr(256 + n) for n, byte in enumerate(others)}


TO_CHAR = _printable()
TO_BYTE = {char: byte for byte, char in TO_CHAR.items()}


class Files:
    """What tokenizer.json, tokenizer_config.json, chat_template.jinja and the model's own files say of a tokenizer."""

    def __init__(
        self,
        tokenizer: dict,
        config: dict,
        chat_template: str | None,
        eos_ids: list[int],
        bos_id: int | None = None,
        elsewhere: list[Any] = (),
    ) -> None:
        """`eos_ids`, `bos_id`: as generation_config.json or config.json has them, if they do. `elsewhere`: tokens,
        names or dictionaries, that other files than tokenizer.json tell of. Raises ValueError."""
        self.tokenizer, self.config, self.chat_template = tokenizer, config, chat_template
        added = tokenizer.get("added_tokens") or []
        self.added = {str(token["content"]): token["id"] for token in added}
        self.non_special_added_tokens = [token["content"] for token in added if not token.get("special")]
        self.bendable = any(token.get(name) for token in added for name in FLAGS[:3])
        self.normalized = {bool(token.get("normalized")) for token in added}
        self._check(added, elsewhere)
        names = [(name, self.config.get(name)) for name in SPECIAL]
        self.named = {name: x.get("content") if isinstance(x, dict) else x for name, x in names if x is not None}
        self.eos_ids = eos_ids or [self.added[name] for name in [self.named.get("eos_token")] if name in self.added]
        if any(type(i) is not int or not 0 <= i < MAX_VOCAB for i in [*self.eos_ids, *self.added.values()]):
            raise ValueError("the number of a token that ends a text, or of an added one, is none")
        by_number = {number: name for name, number in self.added.items()}
        self.bos_token = self.named.get("bos_token") or by_number.get(bos_id)
        self.bos_token = self.bos_token or next((n for n, i in self.added.items() if i in self.eos_ids), None)
        if self.bos_token not in self.added or not self.eos_ids:
            raise ValueError("it names no token that begins or ends a text")
        self.bos_id = self.added[self.bos_token]
        before = _template(tokenizer.get("post_processor"), self.added)
        self.bos_prefix = before or ([self.bos_id] if config.get(ADD_BOS_KEY) is True else [])
        if self.bos_prefix not in ([], [self.bos_id]):
            raise ValueError("texts begin with more than one special token")

    def _check(self, added: list[dict], elsewhere: list[Any]) -> None:
        """Raise ValueError where the library, or transformers, would make other tokens than tokenizer.json says."""
        if len(self.added) < len(added):
            raise ValueError("it adds a token twice")
        if self.chat_template is not None and not isinstance(self.chat_template, str):
            raise ValueError("its chat template is no text")
        model = self.tokenizer["model"]
        for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
            if model.get(name) and model.get("type") == "BPE":
                raise ValueError(f"its {name} is {model[name]!r}, which is not known here")
        if self.config.get("split_special_tokens"):
            raise ValueError("split_special_tokens is not known here")
        flags = {token["content"]: [bool(token.get(name)) for name in FLAGS] for token in added}
        for token in elsewhere:
            name = token.get("content") if isinstance(token, dict) else token
            if name not in self.added:
                raise ValueError(f"it does not add the token {name!r}, of which other files tell")
            if isinstance(token, dict) and [bool(token.get(flag)) for flag in FLAGS] != flags[name]:
                raise ValueError(f"other files tell otherwise where its token {name!r} is found")

    def content(self) -> dict:
        """What decides how text is encoded, and what ends it."""
        names = {"bos_token": self.bos_token, "eos": self.eos_ids, "add_bos": bool(self.bos_prefix)}
        names |= {"named": self.named}
        return {"tokenizer": self.tokenizer, "chat_template": self.chat_template} | names

    def write(self, folder: Path) -> Path:
        """Into an existing folder, each whole or not at all. Returns the path of tokenizer.json."""
        write_json(folder / CONFIG_NAME, self.config | {EOS_KEY: self.eos_ids, BOS_KEY: self.bos_id})
        if self.chat_template is not None:
            replace_text(folder / TEMPLATE_NAME, self.chat_template)
        return write_json(folder / FILE_NAME, self.tokenizer)


class HFTokenizer(Tokenizer):
    """One that is run through the library `tokenizers`, behind the same methods."""

    def __init__(self, files: Files) -> None:  # not tiktoken's: nothing of the base's __init__ is wanted
        self._files, content = files, files.tokenizer
        self._whole = _library(content)
        hidden = {name: number for name, number in files.added.items() if name not in files.non_special_added_tokens}
        self._plain = _library(_without(content, hidden))
        self.kind, self.normalizer, self.chat_template = "hf", None, files.chat_template
        self.special_tokens, self.bos_token, self.named = files.added, files.bos_token, files.named
        self.vocab_size = 1 + max([*self._whole.get_vocab().values()])
        self.bos_id, self.eos_ids, self.bos_prefix = files.bos_id, files.eos_ids, files.bos_prefix
        self.eos_id, self.non_special_added_tokens = self.eos_ids[0], files.non_special_added_tokens
        self._names = {files.added[name]: name.encode() for name in self.non_special_added_tokens}
        special = set(files.added.values())
        if moved := [name for name, number in files.added.items() if self._whole.token_to_id(name) != number]:
            raise ValueError(f"its token {moved[0]!r} has another number in its vocabulary")
        if self.vocab_size > MAX_VOCAB:
            raise ValueError(f"it has ids up to {self.vocab_size}")
        if max(files.eos_ids) >= self.vocab_size:
            raise ValueError(f"what ends a text, {max(files.eos_ids)}, is outside its vocabulary of {self.vocab_size}")
        self._tokens = [None] * self.vocab_size
        to_bytes = _piece_bytes(content)
        for piece, number in self._whole.get_vocab().items():
            if number not in special:
                self._tokens[number] = to_bytes(piece)
        puts, says = self.decode_bytes(self.encode("a")).startswith(b" "), files.config.get("add_prefix_space")
        if says is not None and says != puts:
            raise ValueError(f"add_prefix_space is {says}, and tokenizer.json has it otherwise")

    def encode(self, text: str, allow_special: bool = False) -> list[int]:
        """As Tokenizer.encode."""
        return self._run(self._whole, text).tolist() if allow_special else self._encode(text).tolist()

    def _encode(self, text: str) -> np.ndarray:
        return self._run(self._plain, text)

    def _cut(self, text: str, names: list[str]) -> np.ndarray:
        return self._encode(text)  # the library finds the non_special_added_tokens ones itself

    def _run(self, library: Any, text: str) -> np.ndarray:
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")  # half a pair is no text
        try:
            return np.array(library.encode(text, add_special_tokens=False).ids, dtype=np.uint32)
        except Exception as error:
            if type(error) is not Exception:  # the library's own are plain ones
                raise
            raise UserError(f"the tokenizer cannot encode {text[:40]!r}: {error}") from error

    def decode(self, ids: Any) -> str:
        """As Tokenizer.decode; a space that the encoding puts before a text is taken away again."""
        ids = list(ids)
        self.decode_bytes(ids)  # refuses ids out of range
        return self._whole.decode(ids, skip_special_tokens=True)

    def _content(self) -> dict:
        return self._files.content()

    def with_chat_template(self, template: str) -> Tokenizer:
        """As Tokenizer.with_chat_template."""
        return HFTokenizer(Files(self._files.tokenizer, self._files.config, template, self.eos_ids, self.bos_id))

    def save(self, folder: str | Path) -> Path:
        """Write the files that it came from into an existing folder."""
        return self._files.write(Path(folder))


def _without(content: dict, hidden: dict[str, int]) -> dict:
    """The same with these tokens under names that no text can know: numbers stay, and plain text cannot spell them."""
    secret, model = secrets.token_hex(16), content["model"]
    new = {name: f"{secret} {number}" for name, number in hidden.items()}
    changed = {"unk_token": new.get(model.get("unk_token"), model.get("unk_token"))}
    if isinstance(model.get("vocab"), dict):
        changed["vocab"] = {new.get(piece, piece): number for piece, number in model["vocab"].items()}
    else:  # Unigram's, by number
        changed["vocab"] = [[new.get(piece, piece), score] for piece, score in model["vocab"]]
    if "merges" in model:
        pairs = [tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in model["merges"]]
        changed["merges"] = [pair for pair in pairs if not new.keys() & {*pair, "".join(pair)}]
    added = [token | {"content": new.get(token["content"], token["content"])} for token in content["added_tokens"]]
    return content | {"model": model | changed, "added_tokens": added, "post_processor": None}


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
