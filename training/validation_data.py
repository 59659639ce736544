"""The text of a run, found again from its folder: what it was validated on, and which tokens occur in it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from thinker.data.batches import PackedDataset
from thinker.data.shards import TokenShards
from thinker.data.sources import open_source
from thinker.data.tokenizer import Tokenizer
from thinker.data.tokenizer_factory import load_tokenizer
from thinker.evaluation.perplexity import tokenize
from thinker.interop.load import find_run_directory
from thinker.model import Thinker
from thinker.runtime.errors import UserError
from thinker.training.config import Config, load_config
from thinker.training.corpus import prepare_training_data


def load_run_config(folder: Path) -> Config | None:
    """Of the run that a model lies in; None where it lies in none."""
    run = find_run_directory(folder)
    return None if run is None else load_config(run / "config.yaml", [])


def load_validation_data(folder: Path, tokenizer: Tokenizer, option: str) -> tuple[Config, TokenShards]:
    """The run's config, and its validation tokens; what is not there any more is made again.

    Raises UserError where the folder lies in no run, or its text is not that of the training any more; `option` is what
    names another text.
    """
    config = load_run_config(folder)
    if config is None:
        raise UserError(f"{folder} lies in no run directory, whose text could be taken; say which with {option}")
    own = config.run.init_from is not None or config.data.chat_template is not None
    corpus = prepare_training_data(config, tokenizer if own else None)
    if corpus.tokenizer.content_hash != load_tokenizer(find_run_directory(folder)).content_hash:
        raise UserError(f"the text of data.source={config.data.source} is not that of the training; give {option}")
    return config, corpus.val


def used_token_ids(folder: Path, tokenizer: Tokenizer, scratch: Path, most: int = 50_000) -> Tensor | None:
    """The token ids, but for special ones, in the first so many tokens of what a run was trained on.

    None where the folder lies in no run, its text is not there any more, or would have to be downloaded.
    """
    config = load_run_config(folder)
    if config is None or config.data.source == "hub":
        return None
    column = {} if config.data.column is None else {"column": config.data.column}
    try:
        source = open_source(config.data.source, path=config.data.path, seed=config.run.seed, **column)
        tokens = tokenize(source, tokenizer, most, scratch)
    except UserError:
        return None
    found = np.unique(np.concatenate([shard.tokens for shard in tokens.shards]))
    special = list(tokenizer.special_tokens.values())
    return torch.from_numpy(found[~np.isin(found, special)].astype(np.int64))


def sample_sequences(
    model: Thinker, tokenizer: Tokenizer, folder: Path, path: Path | None, n: int, scratch: Path, longest: int = 256
) -> tuple[Tensor, Tensor]:
    """At most n windows of a text file, or of what the run in `folder` was validated on: tokens and targets, (N, T).

    They lie evenly over the text, or over as much of a file's beginning. Targets are IGNORE_INDEX where no loss is
    counted.

    Raises UserError where there are too few tokens.
    """
    T, packing = min(longest, model.config.max_seq_len), "contiguous"
    if path is None:
        config, tokens = load_validation_data(folder, tokenizer, "--text")
        T, packing = min(T, config.data.seq_len), config.data.packing
        packing = "documents" if config.data.source == "tales" else packing
    else:
        tokens = tokenize(open_source("text", path=str(path)), tokenizer, n * longest + 1, scratch)
    total = sum(shard.n_tokens for shard in tokens.shards)
    T = min(T, total // 8)  # of a short text several windows all the same
    if T < 2:
        raise UserError(f"{path or 'the text'} has {total} tokens; there must be at least 16")
    windows = PackedDataset(tokens, T, packing, prefix_len=model.config.prefix)
    pairs = [windows[int(i)] for i in np.linspace(0, len(windows) - 1, min(n, len(windows))).round()]
    inputs, targets = (torch.from_numpy(np.stack(part)).to(model.device) for part in zip(*pairs))  # (N, T) each
    return inputs, targets
