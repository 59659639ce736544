"""Blocks of keys and values in host memory, in int8, and the search for those that fit a query
best."""

import torch
from torch import Tensor

from thinker.model import ThinkerConfig
from thinker.runtime.device import to_device

FIRST_CAPACITY = 16  # blocks per row; doubles when it is full
MAX_REPRESENTATIVES = 4  # keys that summarize a block, per KV head
# Added per block, so that of equal scores the newest wins whatever the rounding. In the first
# layer, keys without RoPE depend only on the token, so that blocks with the same token have equal
# scores.
TIE_BREAK = 2.0**-15


class BlockStore:
    """Blocks of consecutive positions of one layer, in the order of the text. Keys are stored
    without RoPE.

    A block is summarized by a few of its own keys, as in InfLLM (arXiv:2402.04617): per KV head
    those farthest from the mean of the block, since a key that a query looks for differs from the
    others. The score of a block is the largest product of a query with one of them. Keys and values
    are in int8, with one scale per vector.
    """

    def __init__(
        self,
        batch_size: int,
        n_kv_heads: int,
        block: int,
        head_dim: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """`device`: of queries and summaries; the rest is in host memory. `dtype`: int8, or a
        float, which is exact."""
        B, K, N, D = batch_size, n_kv_heads, FIRST_CAPACITY, head_dim
        R = min(MAX_REPRESENTATIVES, block)
        self.keys = torch.zeros(B, K, N, block, D, dtype=dtype, device="cpu")
        self.values = torch.zeros(B, K, N, block, D, dtype=dtype, device="cpu")
        self.scales = torch.ones(B, K, N, block, 2, device="cpu")  # of keys and values
        self.summaries = torch.zeros(B, R, K, D, N, device=device)

    tensors = ("keys", "values", "scales", "summaries")

    @property
    def capacity(self) -> int:
        """Number of blocks per row that fit without growing."""
        return self.keys.shape[2]

    @property
    def nbytes(self) -> int:
        """Allocated memory in bytes."""
        return sum(getattr(self, name).nbytes for name in self.tensors)

    def put(self, rows: Tensor, blocks: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store a block in each of these rows, (R,): its index, (R,), its keys and values, (R, K,
        block, D) each."""
        while self.capacity <= int(blocks.max()):
            self.grow(2 * self.capacity)
        keys, values = keys.float(), values.float()
        distances = (keys - keys.mean(dim=2, keepdim=True)).norm(dim=-1)  # (R, K, block)
        farthest = distances.topk(self.summaries.shape[1], dim=-1).indices[..., None]
        chosen = keys.gather(2, farthest.expand(-1, -1, -1, keys.shape[-1]))
        self.summaries[rows, ..., blocks] = chosen.transpose(1, 2)  # (R, representatives, K, D)
        rows, blocks, keys, values = (x.cpu() for x in (rows, blocks, keys, values))
        scales = torch.ones(*keys.shape[:3], 2, device="cpu")  # (R, K, block, 2)
        if self.keys.dtype == torch.int8:
            largest = torch.stack((keys, values), dim=-2).abs().amax(dim=-1)
            scales = largest.clamp_min(torch.finfo(torch.float32).tiny) / 127
            keys, values = (keys / scales[..., :1]).round(), (values / scales[..., 1:]).round()
        self.scales[rows, :, blocks] = scales
        self.keys[rows, :, blocks] = keys.to(self.keys.dtype)
        self.values[rows, :, blocks] = values.to(self.values.dtype)

    def search(self, q: Tensor, k: int, n_stored: int, n_stored_by_row: Tensor | None) -> Tensor:
        """Find the k best of the first `n_stored` blocks per KV head, in the order of the text.

        q: queries (B, K, n, G, D), G per KV head, which share their blocks. n_stored_by_row: (B, 1,
        1, 1), if rows have fewer. Blocks that a row lacks are chosen only if it has less than k,
        and come last. Returns (B, K, n, k).
        """
        n, G = q.shape[2:4]
        queries = q.float().flatten(2, 3)[:, None]  # (B, 1, K, n · G, D)
        scores = queries @ self.summaries[..., :n_stored]  # (B, representatives, K, n · G, N)
        scores = scores.amax(dim=1).unflatten(2, (n, G)).amax(dim=3)  # (B, K, n, N)
        index = torch.arange(n_stored, device=q.device)
        scores += TIE_BREAK * index
        if n_stored_by_row is not None:
            scores = scores.masked_fill(index >= n_stored_by_row, -torch.inf)
        return scores.topk(k, dim=-1, sorted=False).indices.sort(dim=-1).values

    def read(self, blocks: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values of blocks (B, K, n, k), on their device: (B, K, n, k · block, D) each."""
        B, K = blocks.shape[:2]
        rows, heads = (torch.arange(n, device="cpu") for n in (B, K))
        at = rows[:, None, None, None], heads[:, None, None], blocks.cpu()
        scales = self.scales[at].to(blocks.device)  # (B, K, n, k, block, 2)
        keys = self.keys[at].to(blocks.device).to(scales.dtype) * scales[..., :1]
        values = self.values[at].to(blocks.device).to(scales.dtype) * scales[..., 1:]
        return keys.to(dtype).flatten(3, 4), values.to(dtype).flatten(3, 4)

    def grow(self, capacity: int) -> None:
        """Make room for at least this many blocks per row."""
        n_new = capacity - self.capacity
        for name, dim in zip(self.tensors, (2, 2, 2, 4)):
            tensor = getattr(self, name)
            shape = (*tensor.shape[:dim], n_new, *tensor.shape[dim + 1 :])
            setattr(self, name, torch.cat((tensor, tensor.new_zeros(shape)), dim=dim))

    def select(self, rows: list[int]) -> None:
        """Keep these rows in this order."""
        for name in self.tensors:
            tensor = getattr(self, name)
            setattr(self, name, tensor.index_select(0, to_device(rows, tensor.device)))

    def concat_rows(self, other: "BlockStore") -> None:
        """Append the rows of another store."""
        capacity = max(self.capacity, other.capacity)
        self.grow(capacity)
        other.grow(capacity)
        for name in self.tensors:
            setattr(self, name, torch.cat((getattr(self, name), getattr(other, name))))


def stored_bytes(config: ThinkerConfig, n_blocks: int, block: int) -> int:
    """Memory of blocks in the stores of all layers: int8 and scales in host memory, representatives
    as fp32."""
    D = config.head_dim
    n_kv_heads = sum(config.head_counts(layer)[1] for layer in range(config.n_layers))
    per_position = 2 * D + 2 * 4  # key and value, and their scales
    representatives = min(MAX_REPRESENTATIVES, block) * D * 4
    return n_blocks * n_kv_heads * (block * per_position + representatives)
