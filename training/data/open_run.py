"""Open an existing run: its config, its validation split, and the tokens in use."""

import shlex
import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from thinker.data.batches.windows import PackedDataset
from thinker.data.corpus.corpus import Corpus
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
from thinker.training.data.run_corpus import find_training_data, prepare_training_data


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

    part: the name of one of several sources. None: the tokens of all sources.

    Tokens come from the token cache. If they are missing there, the text is tokenized again, in
    `scratch` if the cache is read-only. Files named in the config, which may come from a stranger,
    are read only with `read_data`. Raises UserError if there is no run or its text has changed; the
    message names `option`, which chooses other data.
    """
    config = load_run_config(folder)
    if config is None:
        raise UserError(
            f"{folder} is not in a run directory, so it has no validation data; choose data "
            f"with {option}"
        )
    sha256 = read_json(find_checkpoint(folder) / "state.json").get("corpus")
    corpus = find_training_data(config.data, str(sha256), tokenizer.content_hash)
    if corpus is None:
        config, corpus = _tokenize_again(config, tokenizer, option, scratch, read_data)
        if corpus.sha256 != sha256:
            text = f"the text of {config.data.describe_text()}"
            raise UserError(f"{text} has changed since training; choose data with {option}")
    if part is None:
        return config, corpus.val
    names = [name for name, each in corpus.parts.items() if each.val.shards]
    if part not in names:
        reason = "the run has one source; remove the flag"
        if names:
            reason = f"choose from {', '.join(names)}"
        raise UserError(f"--part {part} is no source with validation data; {reason}")
    return config, corpus.parts[part].val


def _tokenize_again(
    config: Config, tokenizer: Tokenizer, option: str, scratch: Path, read_data: bool
) -> tuple[Config, Corpus]:
    """Prepare the corpus of a run whose tokens are not in the cache. The config may get another
    cache_dir."""
    data = config.data
    has_files = bool(data.val_tokens) or any(source.path for source in data.text_sources())
    if has_files and not read_data:
        files = data.describe_text(shlex.quote)
        remedy = (
            f"add --read-data to read the files in its config ({files}), or choose data "
            f"with {option}"
        )
        raise UserError(
            f"the token cache does not contain the validation data of the run; {remedy}"
        )
    if not can_write(Path(data.cache_dir)):
        what = f"data.cache_dir={data.cache_dir} is not writable"
        print(f"{what}; the tokens will not be cached", file=sys.stderr)
        data = data.model_copy(update={"cache_dir": str(scratch)})
        config = config.model_copy(update={"data": data})
    return config, prepare_training_data(config, tokenizer)


def used_token_ids(
    folder: Path, tokenizer: Tokenizer, scratch: Path, max_tokens: int = 50_000
) -> Tensor | None:
    """The ids, except special ones, in the first `max_tokens` tokens of a run's data; None if not
    available."""
    config = load_run_config(folder)
    if config is None:
        return None
    data = config.data
    try:
        if data.text_sources() == [data] and data.path is None:  # a text that needs no files
            source = open_source(data.source, seed=config.run.seed)
            tokens = tokenize(source, tokenizer, max_tokens, scratch)
        else:
            _, tokens = load_validation_data(folder, tokenizer, "--text", scratch)
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
    """Up to n sequences from the start of a text file, or evenly spaced in the validation split of
    the run in `folder`.

    Returns tokens and targets, (N, T) each, on the model's device. Targets without loss are
    IGNORE_INDEX, including those after a sequence's first document if the run masks documents.
    Raises UserError if there are too few tokens.
    """
    T = min(max_len, model.config.max_seq_len)
    packing = "contiguous"
    masking = False
    if path is None:
        config, tokens = load_validation_data(folder, tokenizer, "--text", scratch)
        T = min(T, config.data.seq_len)
        packing = config.data.val_packing
        masking = config.data.val_masking
    else:
        source = open_source("text", path=str(path))
        tokens = tokenize(source, tokenizer, n * max_len + 1, scratch)
    T = min(T, tokens.n_tokens // 8)  # several sequences even of a short text
    if T < 2:
        text = path or "the validation split"
        raise UserError(f"{text} has only {tokens.n_tokens} tokens; use a text of at least 16")
    dataset = PackedDataset(
        tokens, T, packing, document_masking=masking, prefix_len=model.config.prefix
    )
    indices = np.linspace(0, len(dataset) - 1, min(n, len(dataset))).round()
    inputs, targets = dataset.batch(indices)  # (N, T) each
    if masking:
        document_ids = dataset.document_ids(inputs)
        targets[document_ids != document_ids[:, :1]] = IGNORE_INDEX
    return inputs.to(model.device), targets.to(model.device)
