"""The data of an existing run: its config, validation split and tokens in use."""

import shlex
import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from thinker.data.batches.batches import PackedDataset
from thinker.data.corpus.shards import TokenShards
from thinker.data.text.sources import open_source
from thinker.data.tokenizers.tokenizer import Tokenizer
from thinker.evaluation.perplexity import tokenize
from thinker.interop.find import find_checkpoint, find_run_directory
from thinker.model import Thinker
from thinker.runtime.constants import IGNORE_INDEX
from thinker.runtime.errors import UserError
from thinker.runtime.files import can_write
from thinker.runtime.reading import read_json
from thinker.training.config.config import Config
from thinker.training.config.load import load_config
from thinker.training.training_data import find_training_data, prepare_training_data


def load_run_config(folder: Path) -> Config | None:
    """The config of the run that contains a model's folder, or None outside a run directory."""
    run = find_run_directory(folder)
    return None if run is None else load_config(run / "config.yaml", [])


def load_validation_data(
    folder: Path,
    tokenizer: Tokenizer,
    option: str,
    scratch: Path,
    read_data: bool = False,
    part: str | None = None,
) -> tuple[Config, TokenShards]:
    """The config of the run that contains a checkpoint, and its validation tokens.

    part: the name of a source of a mixture. None: the tokens of all sources.

    Tokens come from the token cache. If they are missing there, the text is tokenized again, in `scratch` if the cache
    is read-only. Files named in the config, which may come from a stranger, are read only with `read_data`. Raises
    UserError if there is no run or its text has changed; the message names `option`, which chooses other data.
    """
    config = load_run_config(folder)
    if config is None:
        raise UserError(
            f"{folder} is not in a run directory, so it has no validation data; choose data with {option}"
        )
    data, sha256 = config.data, read_json(find_checkpoint(folder) / "state.json").get("corpus")
    corpus = find_training_data(data, str(sha256), tokenizer.content_hash)
    if corpus is None:
        source = data.describe_text()
        if (any(each.path for each in data.text_sources()) or data.val_tokens) and not read_data:
            files = data.describe_text(shlex.quote)
            remedy = f"add --read-data to read the files in its config ({files}), or choose data with {option}"
            raise UserError(
                f"the token cache does not contain the validation data of the run; {remedy}"
            )
        if not can_write(Path(data.cache_dir)):
            print(
                f"data.cache_dir={data.cache_dir} is not writable; the tokens will not be cached",
                file=sys.stderr,
            )
            config = config.model_copy(
                update={"data": data.model_copy(update={"cache_dir": str(scratch)})}
            )
        corpus = prepare_training_data(config, tokenizer)
        if corpus.sha256 != sha256:
            raise UserError(
                f"the text of {source} has changed since training; choose data with {option}"
            )
    if part is None:
        return config, corpus.val
    if part not in corpus.parts or not corpus.parts[part].val.shards:
        names = [name for name, each in corpus.parts.items() if each.val.shards]
        reason = (
            f"choose from {', '.join(names)}"
            if names
            else "the run has one source; remove the flag"
        )
        raise UserError(f"--part {part} is no source with validation data; {reason}")
    return config, corpus.parts[part].val


def used_token_ids(
    folder: Path, tokenizer: Tokenizer, scratch: Path, max_tokens: int = 50_000
) -> Tensor | None:
    """The ids, except special ones, in the first `max_tokens` tokens of a run's data; None if not available."""
    config = load_run_config(folder)
    if config is None:
        return None
    try:
        if config.data.sources is None and config.data.path is None:
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
    model: Thinker,
    tokenizer: Tokenizer,
    folder: Path,
    path: Path | None,
    n: int,
    scratch: Path,
    max_len: int = 256,
) -> tuple[Tensor, Tensor]:
    """Up to n sequences from the start of a text file, or evenly spaced in the validation split of the run in `folder`.

    Returns tokens and targets, (N, T) each, on the model's device. Targets without loss are IGNORE_INDEX, including
    those after a sequence's first document if the run masks documents. Raises UserError if there are too few tokens.
    """
    T, packing, masking = min(max_len, model.config.max_seq_len), "contiguous", False
    if path is None:
        config, tokens = load_validation_data(folder, tokenizer, "--text", scratch)
        T, packing, masking = (
            min(T, config.data.seq_len),
            config.data.val_packing,
            config.data.document_masking,
        )
    else:
        tokens = tokenize(open_source("text", path=str(path)), tokenizer, n * max_len + 1, scratch)
    total = sum(shard.n_tokens for shard in tokens.shards)
    T = min(T, total // 8)  # several sequences even of a short text
    if T < 2:
        raise UserError(
            f"{path or 'the validation split'} has only {total} tokens; use a text of at least 16"
        )
    dataset = PackedDataset(
        tokens, T, packing, document_masking=masking, prefix_len=model.config.prefix
    )
    inputs, targets = dataset.batch(
        np.linspace(0, len(dataset) - 1, min(n, len(dataset))).round()
    )  # (N, T) each
    if masking:
        document_ids = dataset.document_ids(inputs)
        targets[document_ids != document_ids[:, :1]] = IGNORE_INDEX
    return inputs.to(model.device), targets.to(model.device)
