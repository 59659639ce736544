"""A small picture of the attention of a model on the start of the validation text."""

import struct
import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

from thinker.data.corpus.corpus import Corpus
from thinker.data.tokenizers.token_label import token_label
from thinker.model import Thinker
from thinker.runtime.errors import UserError
from thinker.training.distributed.parallel_model import unwrapped_copy

N_TOKENS = 16
MAX_SIDE = 12  # layers and heads that are shown
INK = (58, 134, 212)  # red, green, blue: visible on light and on dark pages


@dataclass(frozen=True)
class AttentionPicture:
    """Attention weights on a text of T tokens. Missing heads are NaN."""

    labels: list[str]  # T
    weights: Tensor  # (layers, H, T, T) fp32 on the host; rows are queries

    @property
    def mean(self) -> Tensor:
        """The mean over all heads of all layers, (T, T)."""
        return self.weights.flatten(0, 1).nanmean(dim=0)

    def shares(self) -> list[tuple[float, float, float]]:
        """The mean weight on the previous token, the first token and the token itself, by layer.

        The first two tokens do not count, as their previous and first tokens are the same.
        """
        layers = self.weights.nanmean(dim=1)[:, 2:]  # (layers, T − 2, T)
        previous = layers[:, :, 1:-1].diagonal(dim1=1, dim2=2).mean(dim=1)
        first = layers[:, :, 0].mean(dim=1)
        itself = layers[:, :, 2:].diagonal(dim1=1, dim2=2).mean(dim=1)
        return list(zip(previous.tolist(), first.tolist(), itself.tolist()))


def attention_picture(model: Thinker, corpus: Corpus) -> AttentionPicture | str:
    """The attention of the current weights; or a sentence that says why there is none.

    It draws no random numbers and changes nothing.
    """
    if hasattr(model, "unshard"):  # FSDP2; gathering all weights could exceed the memory
        return "There is no picture of attention, as the weights are sharded over several ranks."
    ids = corpus.val.shards[0].tokens[:N_TOKENS].tolist()
    if len(ids) > model.config.max_seq_len or not model.config.prefix < len(ids) >= 4:
        return (
            f"There is no picture of attention: it needs {N_TOKENS} tokens of validation text, "
            f"and a model that reads them at once."
        )
    copy = unwrapped_copy(model)  # of the modules; the weights stay where they are
    tokens = torch.tensor([ids], device=model.device)
    try:
        weights = copy.attention_weights(tokens)[:, 0]
    except UserError as error:
        return f"There is no picture of attention: {error}."
    labels = [token_label(corpus.tokenizer, token) for token in ids]
    return AttentionPicture(labels, weights.float().cpu())


def transparent_png(weights: Tensor) -> bytes:
    """A square image, one pixel per weight (T, T): the larger the weight, the less transparent.

    Opacity is the square root of the weight, so that small weights are visible.
    """
    side = len(weights)
    opacity = (weights.clamp(0, 1).sqrt() * 255).round().to(torch.uint8)
    pixels = torch.empty(side, side, 4, dtype=torch.uint8)
    pixels[:, :, :3] = torch.tensor(INK, dtype=torch.uint8)
    pixels[:, :, 3] = opacity
    rows = b""
    for row in pixels:
        rows += b"\0" + row.numpy().tobytes()  # 0: no filter
    header = struct.pack(">IIBBBBB", side, side, 8, 6, 0, 0, 0)  # 8 bits, red green blue alpha
    png = b"\x89PNG\r\n\x1a\n"
    for kind, data in ((b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")):
        checksum = zlib.crc32(kind + data)
        png += struct.pack(">I", len(data)) + kind + data + struct.pack(">I", checksum)
    return png
