"""A folder of tokens that another machine has prepared, as a source (data.source=tokens)."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from thinker.data.corpus.corpus_index import INDEX, read_index
from thinker.data.corpus.shards import DamagedShard, TokenShards
from thinker.data.text.document import Document, MissingData, Start
from thinker.data.text.sources import Source, SourceOptions, bounded_source
from thinker.data.tokenizers.saved_tokenizer import load_tokenizer
from thinker.runtime.errors import UserError
from thinker.runtime.reading import read_json


def open_tokens(name: str, options: SourceOptions) -> Source:
    """The documents of the folder, decoded: first those for training, then those for validation.

    Raises UserError for a folder without an index, and for options without effect.
    """
    path = options.path
    index = Path(path) / INDEX
    if not index.is_file():
        raise MissingData(
            f"data.path={path} has no {INDEX}; use a folder of {{data.cache_dir}}/tokens, copied "
            "from the machine that tokenized the text"
        )
    for key, value in (
        ("max_documents", options.max_documents),
        ("buffer_tokens", options.first_bytes),
    ):
        if value is not None:
            raise UserError(
                f"data.{key} has no effect with data.source=tokens, which is tokenized; "
                "set it to null"
            )
    sha256 = read_json(index, MissingData).get("sha256")
    return bounded_source(name, partial(_decode, path), [sha256], options, None)


def damaged(path: str, error: DamagedShard) -> UserError:
    """What a user is told about a damaged folder."""
    return UserError(f"data.path={path} is damaged: {error}; copy it again")


def _decode(path: str, start: Start) -> Iterator[Document]:
    """The texts of the folder, from document number `start[0]` on."""
    folder = Path(path)
    n_before = start[0]
    try:
        index = read_index(folder)
        tokenizer = load_tokenizer(folder)
        splits = [TokenShards.open(folder, index[name], tokenizer) for name in ("train", "val")]
    except DamagedShard as error:
        raise damaged(path, error) from error
    for tokens in splits:
        if tokens.has_conversations:
            raise UserError(f"data.path={path} has conversations, whose text is not in the tokens")
        for shard in tokens.shards:
            offsets = shard.offsets[:]
            for number in range(min(n_before, shard.n_documents), shard.n_documents):
                ids = shard.tokens[int(offsets[number]) + 1 : int(offsets[number + 1])]
                if shard.has_eos:
                    ids = ids[:-1]
                yield Document(tokenizer.decode(ids.tolist()))
            n_before -= min(n_before, shard.n_documents)
