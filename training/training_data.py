"""The data of a config, and of a run that is found from its folder: its validation set, and the tokens in use."""

import shlex
import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from thinker.data.batches import PackedDataset
from thinker.data.corpus import Corpus, find_corpus, prepare_corpus
from thinker.data.shards import TokenShards
from thinker.data.sources import open_source
from thinker.data.tokenizer import Tokenizer
from thinker.evaluation.perplexity import tokenize
from thinker.interop.load import find_checkpoint, find_run_directory
from thinker.model import Thinker
from thinker.runtime.constants import IGNORE_INDEX
from thinker.runtime.errors import UserError
from thinker.runtime.files import can_write
from thinker.runtime.reading import read_json
from thinker.training.config import Config, load_config


def prepare_training_data(config: Config, tokenizer: Tokenizer | None = None) -> Corpus:
    """The config's corpus as tokens on disk; `tokenizer`: instead of the one that the config names."""
    names = {"path", "config", "split", "column", "streaming", "assistant_only_loss", "val_fraction", "max_documents"}
    options = config.data.model_dump(include=names | {"val_tokens", "cache_dir"}, exclude_none=True)
    tokenizer = tokenizer or config.data.tokenizer
    return prepare_corpus(source=config.data.source, tokenizer=tokenizer, seed=config.run.seed, **options)


def load_run_config(folder: Path) -> Config | None:
    """The config of the run that a model's folder is in, None for other folders."""
    run = find_run_directory(folder)
    return None if run is None else load_config(run / "config.yaml", [])


def load_validation_data(
    folder: Path, tokenizer: Tokenizer, option: str, scratch: Path, read_data: bool = False
) -> tuple[Config, TokenShards]:
    """The config of the run that a checkpoint is in, and the run's validation tokens.

    They come from the token cache, or are made again, in `scratch` where nothing can be written there: from files that
    the config, perhaps a stranger's, names only with `read_data`. Raises UserError, naming `option`, which chooses
    other data, for other folders, or changed data.
    """
    config = load_run_config(folder)
    if config is None:
        raise UserError(f"{folder} is not in a run directory with validation data; choose data with {option}")
    data, sha256 = config.data, read_json(find_checkpoint(folder) / "state.json").get("corpus")
    corpus = find_corpus(str(sha256), tokenizer.content_hash, data.cache_dir)
    if corpus is None:
        source = f"data.source={data.source}"
        if (data.path or data.val_tokens) and not read_data:
            files = f"{source} data.path={shlex.quote(str(data.path))}"
            remedy = f"add --read-data to read what its config names ({files}), or choose data with {option}"
            raise UserError(f"the run's validation data is not in the token cache; {remedy}")
        if not can_write(Path(data.cache_dir)):
            print(f"data.cache_dir={data.cache_dir} cannot be written; tokenizing for this time only", file=sys.stderr)
            config = config.model_copy(update={"data": data.model_copy(update={"cache_dir": str(scratch)})})
        corpus = prepare_training_data(config, tokenizer)
        if corpus.sha256 != sha256:
            raise UserError(f"the text of {source} has changed since the training; choose data with {option}")
    return config, corpus.val


def used_token_ids(folder: Path, tokenizer: Tokenizer, scratch: Path, max_tokens: int = 50_000) -> Tensor | None:
    """The ids, except special ones, in the first `max_tokens` tokens of a run's data; None if that is not at hand."""
    config = load_run_config(folder)
    if config is None:
        return None
    try:
        if config.data.path is None:
            source = open_source(config.data.source, seed=config.run.seed)
            tokens = tokenize(source, tokenizer, max_tokens, scratch)
        else:
            tokens = load_validation_data(folder, tokenizer, "--text", scratch)[1]
    except UserError:
        return None
    token_ids = np.unique(np.concatenate([shard.tokens[:max_tokens] for shard in tokens.shards]))
    special = list(tokenizer.special_tokens.values())
    return torch.from_numpy(token_ids[~np.isin(token_ids, special)].astype(np.int64))


def sample_sequences(
    model: Thinker, tokenizer: Tokenizer, folder: Path, path: Path | None, n: int, scratch: Path, max_len: int = 256
) -> tuple[Tensor, Tensor]:
    """At most n sequences of the beginning of a text file, or from all over the validation set of the run in `folder`.

    Returns tokens and targets, (N, T) each, on the model's device. Targets without loss are IGNORE_INDEX; where the run
    masks documents, so are those after a sequence's first one. Raises UserError where there are too few tokens.
    """
    T, packing, masking = min(max_len, model.config.max_seq_len), "contiguous", False
    if path is None:
        config, tokens = load_validation_data(folder, tokenizer, "--text", scratch)
        T, packing, masking = min(T, config.data.seq_len), config.data.packing, config.data.document_masking
        packing = "documents" if config.data.source == "tales" else packing
    else:
        tokens = tokenize(open_source("text", path=str(path)), tokenizer, n * max_len + 1, scratch)
    total = sum(shard.n_tokens for shard in tokens.shards)
    T = min(T, total // 8)  # several sequences even of a short text
    if T < 2:
        raise UserError(f"{path or 'the text'} has {total} tokens; it needs at least 16")
    dataset = PackedDataset(tokens, T, packing, document_masking=masking, prefix_len=model.config.prefix)
    inputs, targets = dataset.batch(np.linspace(0, len(dataset) - 1, min(n, len(dataset))).round())  # (N, T) each
    if masking:
        document_ids = dataset.document_ids(inputs)
        targets[document_ids != document_ids[:, :1]] = IGNORE_INDEX
    return inputs.to(model.device), targets.to(model.device)
