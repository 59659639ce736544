"""The loss on FineWeb's validation tokens, by which replications of GPT-2 are compared.

They report it on the first 10,485,760 tokens of fineweb_val_000000.bin, in sequences of 1,024 that
begin anywhere in a document. 3.28 nats per token is regarded as GPT-2's loss.
"""

import tempfile
from pathlib import Path

import numpy as np

from thinker.data.batches.windows import PackedDataset
from thinker.data.corpus.llmc_tokens import read_tokens
from thinker.data.corpus.shard_writer import ShardWriter
from thinker.data.corpus.shards import TokenShards
from thinker.data.tokenizers.text_bytes import token_byte_lengths
from thinker.data.tokenizers.tokenizer import Tokenizer
from thinker.evaluation.perplexity import TextLoss, text_loss
from thinker.model import Thinker
from thinker.runtime.errors import UserError

VAL_TOKENS = 10_485_760
CONTEXT = 1024
GPT2_LOSS = 3.28  # nats per token
GPT2_IDS = {"Hello": 15496, " world": 995}


def fineweb_loss(
    model: Thinker,
    tokenizer: Tokenizer,
    path: str,
    context: int = CONTEXT,
    n_tokens: int = VAL_TOKENS,
    confidence: float = 0.95,
) -> TextLoss:
    """The loss on the first `n_tokens` targets of a file, in sequences of `context` tokens.

    Targets that do not fill a sequence are left out. Raises UserError for another vocabulary than
    GPT-2's, and for a file that is none or shorter than a sequence.
    """
    check_vocabulary(tokenizer)
    tokens = read_tokens(path, tokenizer, f"--fineweb {path}", "the model's tokenizer")
    tokens = tokens[: n_tokens + 1]
    n_windows = (len(tokens) - 1) // context
    if n_windows == 0:
        raise UserError(
            f"--fineweb {path} has {len(tokens):,} tokens, less than a sequence of {context}; "
            "lower --context or raise --max-tokens"
        )
    byte_lengths = token_byte_lengths(tokenizer)
    with tempfile.TemporaryDirectory() as folder:
        shards = write_shard(tokens, tokenizer, byte_lengths, Path(folder))
        windows = PackedDataset(shards, context, "contiguous", prefix_len=model.config.prefix)
        return text_loss(model, windows, byte_lengths, confidence, context, n_windows)


def check_vocabulary(tokenizer: Tokenizer) -> None:
    """Raise UserError unless it is GPT-2's."""
    ids = {word: tokenizer.encode(word) for word in GPT2_IDS}
    is_known = ids == {word: [number] for word, number in GPT2_IDS.items()}
    if not is_known or tokenizer.bos_id != 50256:
        raise UserError(
            "--fineweb needs a model with GPT-2's vocabulary (data.tokenizer=tiktoken:gpt2); "
            "losses per token of other vocabularies cannot be compared"
        )


def write_shard(
    tokens: np.ndarray, tokenizer: Tokenizer, byte_lengths: np.ndarray, folder: Path
) -> TokenShards:
    """Write tokens, the last of whose documents may be cut, to a shard."""
    writer = ShardWriter(folder, "fineweb", tokenizer)
    starts = np.flatnonzero(tokens == tokenizer.bos_id)
    ends = [*starts[1:], len(tokens)]
    for start, end in zip(starts, ends):
        ids = tokens[start + 1 : end]
        writer.add(ids, int(byte_lengths[ids].sum()))
    writer.close()
    return TokenShards.open(folder, writer.files, tokenizer)


def compare(loss: TextLoss) -> str:
    """A line that compares the loss with GPT-2's, or says why it cannot be compared."""
    n_compared = f"{VAL_TOKENS:,} tokens in sequences of {CONTEXT}"
    if (loss.n_tokens, loss.context_length) != (VAL_TOKENS, CONTEXT):
        return f"not compared with GPT-2, whose {GPT2_LOSS} nats per token are of {n_compared}"
    nats = loss.nats_per_token
    difference = f"{nats.mean - GPT2_LOSS:+.4f}"
    if nats.low is not None:
        difference += f" [{nats.low - GPT2_LOSS:+.4f}, {nats.high - GPT2_LOSS:+.4f}]"
    return f"{difference} nats per token from {GPT2_LOSS}, the loss of GPT-2 on these {n_compared}"
