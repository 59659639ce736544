"""Prepare the corpus of a mixture: each source is a corpus of its own in the cache; all share one
tokenizer."""

import contextlib
import hashlib
import json
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from thinker.data.corpus.building_folder import building_folder, publish
from thinker.data.corpus.corpus import Corpus, find_corpus, prepare_corpus
from thinker.data.corpus.corpus_index import read_index, write_index
from thinker.data.corpus.shards import DamagedShard, TokenShards
from thinker.data.text.sources import open_source
from thinker.data.text.split import split_documents
from thinker.data.text.text_sample import sample_texts
from thinker.data.tokenizers import tokenizer_factory
from thinker.data.tokenizers.saved_tokenizer import load_tokenizer
from thinker.data.tokenizers.tokenizer import Tokenizer
from thinker.data.tokenizers.tokenizer_factory import check_spec, make_tokenizer
from thinker.runtime.errors import UserError
from thinker.runtime.files import make_folder
from thinker.training.config.config import Config

SAMPLE_FORMAT = 1  # changes with the way to choose the text that a tokenizer is trained on
# Options of prepare_corpus() that are none of open_source().
NOT_OF_THE_SOURCE = {"val_fraction", "assistant_only_loss", "document_filter"}


def prepare_sources(config: Config, tokenizer: str | Tokenizer) -> Corpus:
    """Prepare the sources in `data.sources`."""
    data = config.data
    sources = {}
    for source in data.sources:
        sources[source.label] = data.corpus_options(source) | {"seed": config.run.seed}
    return prepare_mixture(sources, tokenizer, data.cache_dir)


def prepare_mixture(
    sources: Mapping[str, Mapping[str, Any]],
    tokenizer: str | Tokenizer,
    cache_dir: str | Path,
    progress: bool = True,
) -> Corpus:
    """Tokenize each source, or open its shards in the cache. Their key depends on other sources
    only by the tokenizer.

    A tokenizer that is made from text ("bpe", "char") is trained on a sample of all sources, an
    equal amount of each, and kept in the cache, too.

    Args:
        sources: the options of corpus.prepare_corpus for each source, by its name.

    Raises UserError, which names the source, for what prepare_corpus does not accept.
    """
    if not any(options["val_fraction"] for options in sources.values()):
        raise UserError(
            "no source of the mixture has a validation split; set val_fraction above 0 in one "
            "of them"
        )
    if isinstance(tokenizer, str):
        if check_spec(tokenizer) in ("bpe", "char"):
            tokenizer = _shared_tokenizer(tokenizer, sources, Path(cache_dir), progress)
        else:
            tokenizer = make_tokenizer(tokenizer, [])
    parts = {}
    for name, options in sources.items():
        with _naming(name):
            parts[name] = prepare_corpus(
                tokenizer=tokenizer, cache_dir=cache_dir, progress=progress, **options
            )
    return _join(parts)


def find_mixture(
    names: list[str], sha256: str, tokenizer_hash: str, cache_dir: str | Path
) -> Corpus | None:
    """Find the undamaged corpus of a mixture in the cache by its identity; None if a part is
    missing."""
    hashes = sha256.split("+")
    if len(hashes) != len(names):
        return None
    parts = {}
    for name, part_sha256 in zip(names, hashes):
        part = find_corpus(part_sha256, tokenizer_hash, cache_dir)
        if part is None:
            return None
        parts[name] = part
    return _join(parts)


def _join(parts: dict[str, Corpus]) -> Corpus:
    first = next(iter(parts.values()))
    train = []
    val = []
    for part in parts.values():
        train += part.train.shards
        val += part.val.shards
    return Corpus(
        tokenizer=first.tokenizer,
        train=TokenShards(train, sum(part.train.n_conversations for part in parts.values())),
        val=TokenShards(val, sum(part.val.n_conversations for part in parts.values())),
        sha256="+".join(part.sha256 for part in parts.values()),
        folder=first.folder,
        parts=parts,
    )


def _shared_tokenizer(
    spec: str, sources: Mapping[str, Mapping[str, Any]], cache_dir: Path, progress: bool
) -> Tokenizer:
    """The tokenizer of a mixture, from the cache or trained now."""
    opened = {}
    for name, options in sources.items():
        with _naming(name):
            of_source = {key: options[key] for key in options.keys() - NOT_OF_THE_SOURCE}
            opened[name] = open_source(**of_source)
    fractions = [options["val_fraction"] for options in sources.values()]
    parts = [SAMPLE_FORMAT, spec, [source.key for source in opened.values()], fractions]
    key = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]
    folder = cache_dir / "tokenizers" / key
    with contextlib.suppress(DamagedShard):  # or missing
        return _open(folder)
    shutil.rmtree(folder, ignore_errors=True)
    make_folder(folder.parent, "data.cache_dir")
    texts = []
    n_bytes = tokenizer_factory.SAMPLE_BYTES // len(opened)
    for (name, source), val_fraction in zip(opened.items(), fractions):
        with _naming(name):
            documents = split_documents(source, val_fraction)
            sample, _ = sample_texts(source, documents, n_bytes, progress)
            texts += sample
    if progress:
        print(f"training {spec} on {', '.join(sources)} ...", file=sys.stderr)
    with building_folder(folder) as building:
        if not folder.exists():  # another process may just have written it
            make_tokenizer(spec, texts).save(building)
            write_index(building, {})
            publish(building, folder)
    return _open(folder)


def _open(folder: Path) -> Tokenizer:
    read_index(folder)
    return load_tokenizer(folder)


@contextlib.contextmanager
def _naming(name: str) -> Iterator[None]:
    """Context manager: errors name the source."""
    try:
        yield
    except UserError as error:
        raise type(error)(f"{name} in data.sources: {error}") from error
