"""A tokenized corpus: find it in the cache, or have it built (corpus_builder.py)."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thinker.data.corpus.corpus_index import read_index
from thinker.data.corpus.shards import FORMAT, SHARD_TOKENS, DamagedShard, TokenShards
from thinker.data.text.sources import open_source, stamps
from thinker.data.text.split import is_near
from thinker.data.tokenizers.saved_tokenizer import load_tokenizer
from thinker.data.tokenizers.tokenizer import Tokenizer
from thinker.data.tokenizers.tokenizer_factory import check_spec
from thinker.runtime.errors import UserError
from thinker.runtime.files import make_folder
from thinker.runtime.reading import read_json

if TYPE_CHECKING:
    from thinker.data.corpus.document_filter import DocumentFilter

INDEX_FORMAT = 5  # changes with corpus.json, and with the text that a tokenizer is trained on
CONVERSATION_FORMAT = 4  # changes with the tokens of conversations


@dataclass(frozen=True)
class Corpus:
    """A tokenized corpus: tokenizer, both splits, the sha256 of their tokens, and the folder in the
    cache.

    The sha256 (of tokens and loss masks) and the tokenizer's content_hash identify a corpus in the
    cache and in runs. A corpus of several parts has the shards of its parts, one after the other.
    """

    tokenizer: Tokenizer
    train: TokenShards
    val: TokenShards
    sha256: str = field(repr=False)
    folder: Path
    parts: Mapping[str, Corpus] = field(default_factory=dict)  # by name; empty if it has none
    notes: Sequence[str] = ()  # what was said about its conversations


def prepare_corpus(
    *,
    source: str,
    tokenizer: str | Tokenizer = "bpe:4096",
    assistant_only_loss: bool = False,
    val_fraction: float = 0.05,
    cache_dir: str | Path = ".cache",
    progress: bool = True,
    shard_tokens: int = SHARD_TOKENS,
    val_tokens: str | None = None,
    document_filter: DocumentFilter | None = None,
    **source_options: Any,
) -> Corpus:
    """Tokenize a source into shards on disk, or open the shards of an earlier call with the same
    options.

    The validation split is the last val_fraction of a single text, or the documents whose content
    hash is below val_fraction, so equal documents are always in the same split (but see
    split.split_documents for few files). A share far from val_fraction is said. The tokenizer is
    trained only on the training split. With val_fraction=0, the validation split is empty.
    Documents without text are skipped with a message. Memory does not grow with the corpus, except
    with a filter. The source "tokens" is a folder that this function has written elsewhere; it is
    used as it is.

    Args:
        tokenizer: a tokenizer or its name (see tokenizer_factory.check_spec).
        assistant_only_loss: use only the assistant's messages of conversations as targets.
        progress: print bars and messages to standard error.
        shard_tokens: a shard is closed after the document that reaches this many tokens.
        val_tokens: a file of tokens (llmc_tokens.py) whose documents form the validation split.
            Equal documents of the source are left out.
        document_filter: drops documents; the source is then read once more. corpus.json counts
            them.
        source_options: passed to sources.open_source.

    Raises UserError for invalid options, and for text that is missing, unreadable or too short to
    split.
    """
    kind = check_spec(tokenizer) if isinstance(tokenizer, str) else tokenizer.kind
    if not 0 <= val_fraction < 1:
        raise UserError(
            f"data.val_fraction={val_fraction}: use a fraction between 0 and 1, for example 0.05"
        )
    opened = open_source(source, **source_options)
    if source == "tokens":
        without_effect = {
            "assistant_only_loss": assistant_only_loss,
            "val_tokens": val_tokens,
            "clean": document_filter,
        }
        path = os.path.expanduser(source_options["path"])
        return _open_tokenized(path, tokenizer, without_effect)
    if val_tokens is not None:
        from thinker.data.corpus.llmc_tokens import check_val_tokens

        check_val_tokens(val_tokens, kind, opened, document_filter)
    if document_filter is not None:
        document_filter.check_source(opened)
    spec = load_tokenizer(tokenizer) if kind == "path" else tokenizer
    if isinstance(spec, Tokenizer):
        kind = spec.kind
        tokenizer_key = spec.content_hash
    else:
        tokenizer_key = spec
    if source == "repeated_random" and kind not in ("byte", "char"):
        raise UserError(
            f"data.tokenizer={tokenizer}: use byte or char with data.source=repeated_random"
        )

    # Whatever changes the tokens is in the key. Options enter only if they are on, so that old keys
    # stay valid.
    parts = [INDEX_FORMAT, FORMAT, opened.key, tokenizer_key, val_fraction, shard_tokens]
    if assistant_only_loss:
        parts.append("assistant_only_loss")
    if isinstance(spec, Tokenizer) and spec.chat_template is not None:
        parts.append(f"conversations {CONVERSATION_FORMAT}")
    if val_tokens is not None:
        parts.append(stamps([val_tokens]))
    if document_filter is not None:
        parts += document_filter.cache_key()
    key = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]
    folder = Path(cache_dir) / "tokens" / key
    corpus = _open_cached(folder)
    if corpus is not None and progress:
        for line in corpus.notes:
            print(line, file=sys.stderr)
    if corpus is None:
        make_folder(folder.parent, "data.cache_dir")
        # Only if nothing is cached.
        from thinker.data.corpus.building_folder import building_folder, publish
        from thinker.data.corpus.corpus_builder import build_corpus

        with building_folder(folder) as building:
            if not folder.exists():  # another process may just have finished it
                build_corpus(
                    building,
                    opened,
                    spec,
                    assistant_only_loss=assistant_only_loss,
                    val_fraction=val_fraction,
                    val_tokens=val_tokens,
                    progress=progress,
                    shard_tokens=shard_tokens,
                    document_filter=document_filter,
                )
                publish(building, folder)
        corpus = open_corpus(folder)
    is_start = source_options.get("first_bytes") is not None  # of a stream
    if progress and val_tokens is None and not is_start:
        _say_share(corpus, source, val_fraction)
    return corpus


def _open_tokenized(
    path: str, tokenizer: str | Tokenizer, without_effect: dict[str, Any]
) -> Corpus:
    """The corpus in a folder from another machine: its tokens and its validation split.

    tokenizer: that of the folder, or the folder itself. without_effect: options that need the text,
    by key; none may be set.
    """
    from thinker.data.corpus.tokenized_folder import damaged

    for key, value in without_effect.items():
        if value:
            raise UserError(
                f"data.{key} has no effect with data.source=tokens, which is tokenized; remove it"
            )
    try:
        corpus = open_corpus(Path(path))
    except DamagedShard as error:
        raise damaged(path, error) from error
    if isinstance(tokenizer, str) and os.path.exists(tokenizer):
        tokenizer = load_tokenizer(tokenizer)
    own = corpus.tokenizer.content_hash
    if isinstance(tokenizer, str) or tokenizer.content_hash != own:
        raise UserError(
            f"data.path={path} was tokenized with a tokenizer of its own; set data.tokenizer={path}"
        )
    return corpus


def _open_cached(folder: Path) -> Corpus | None:
    """The corpus in a folder, or None. Removes a damaged one."""
    try:
        if folder.exists():
            return open_corpus(folder)
    except DamagedShard as error:
        print(f"rebuilding the damaged token cache: {error}", file=sys.stderr)
        shutil.rmtree(folder)
    return None


def _say_share(corpus: Corpus, source: str, val_fraction: float) -> None:
    """Say how much of the text is held out, if that is far from what was asked."""
    n_bytes = corpus.train.n_bytes + corpus.val.n_bytes
    share = corpus.val.n_bytes / n_bytes
    if not is_near(share, val_fraction):
        print(
            f"data.source={source}: {share:.1%} of the text is held out for validation, not "
            f"{val_fraction:.1%} (data.val_fraction={val_fraction}): its documents are few or of "
            "very different lengths",
            file=sys.stderr,
        )


def find_corpus(sha256: str, tokenizer_hash: str, cache_dir: str | Path) -> Corpus | None:
    """Find an undamaged corpus in the cache by its identity; None if there is none."""
    for index in sorted((Path(cache_dir) / "tokens").glob("*/corpus.json")):
        with contextlib.suppress(DamagedShard):
            if read_json(index, DamagedShard).get("sha256") == sha256:
                corpus = open_corpus(index.parent)
                if corpus.tokenizer.content_hash == tokenizer_hash:
                    return corpus
    return None


def open_corpus(folder: Path) -> Corpus:
    """Open and verify a finished corpus. Raises DamagedShard."""
    try:
        index = read_index(folder)
        tokenizer = load_tokenizer(folder)
        counts = index.get("n_conversations", {})
        train = TokenShards.open(folder, index["train"], tokenizer, counts.get("train"))
        val = TokenShards.open(folder, index["val"], tokenizer, counts.get("val"))
        notes = [str(note) for note in index.get("notes", [])]
        return Corpus(tokenizer, train, val, str(index["sha256"]), folder, notes=notes)
    except (OSError, ValueError, KeyError, TypeError, UserError) as error:
        raise DamagedShard(f"{folder}: {error}") from error
