"""Read any tokens of any rows of a cache in one pass through the modules of the model: the newest
tokens of some texts beside pieces of prompts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from thinker.model import KVCache, Thinker, ThinkerConfig, proof
from thinker.model.attention_dispatch import AttentionMask, attend
from thinker.model.inspection.open_hooks import has_open_hooks
from thinker.model.kernels.varlen_attention import VarlenRows
from thinker.model.kv_cache import LayerCache
from thinker.model.masks import CacheSlots, ForwardContext, MaskBuilder
from thinker.model.patterns.pattern import CAUSAL, Pattern, TokenInfo
from thinker.runtime.device import to_device
from thinker.runtime.errors import UserError

# Rows of a cache that are read in place for each row that is wanted, rather than copied.
MAX_SPREAD = 2
# Reads that prove a reader, as (row, tokens): pieces of prompts, then single tokens beside a piece.
PROVED_READS = (((0, 5), (2, 3)), ((0, 1), (2, 1), (1, 4)))
PROVED_SHAPE = (3, 8)  # rows and positions of the cache


class PackedReader:
    """Appends tokens to rows of a KVCache, all of them in one pass (see RowDecoder).

    The tokens are one long row of the model's input. Its modules run as they are; only the keys go
    to many rows of the cache, and each token attends to its own. The number of launches does not
    depend on the number of rows.
    """

    def __init__(self, model: Thinker) -> None:
        """`model`: prepared for inference, and known to unsupported()."""
        self.model = model
        self.masks = MaskBuilder.of_model(model.config, model.dtype, model.device, "auto")
        self.masks.relative_bias = model.relative_bias
        self.has_varlen = _has_varlen(model, self.masks)

    @torch.no_grad()
    def read(
        self, cache: KVCache, rows: list[int], tokens: list[int] | Tensor, wanted: Sequence[int]
    ) -> Tensor:
        """As RowDecoder.read(). `tokens` may be on the device, (N,), if each is of another row."""
        model = self.model
        if has_open_hooks(model):
            raise UserError(
                "activations of texts that are read together cannot be recorded or patched; "
                "use generate()"
            )
        positions = cache.reserve_rows(rows, 1)
        end = max(positions) + 1
        if model.rope is not None:
            model.rope.check_growth(end)
        packed = _Packed(rows, positions, tokens, wanted, model.device)

        layers = [_LayerOfRows(layer, packed.rows) for layer in cache.layers]
        context = self._context(packed, end)
        x = model.forward_blocks(packed.tokens[None], context, _Layers(layers))  # (1, N, C)
        if not wanted:
            return x.new_empty(0, model.config.vocab_size)
        if packed.wanted is not None:
            x = x[:, packed.wanted]
        return model.lm_head(x)[0]

    def _context(self, packed: _Packed, end: int) -> ForwardContext:
        """What all layers need to know of a pass over positions below `end`."""
        groups: list[_PaddedAttention | _VarlenAttention] = []
        if packed.alone is not None:
            groups.append(_PaddedAttention(packed.alone, self.masks))
        if packed.pieces is not None and self.has_varlen:
            groups.append(_VarlenAttention(packed.pieces))
        elif packed.pieces is not None:
            groups.append(_PaddedAttention(packed.pieces, self.masks))
        masks: dict[Pattern, AttentionMask] = {}
        for pattern in self.masks.patterns:
            compute = partial(_attend_by_group, groups, pattern)
            masks[pattern] = AttentionMask(kernel="cache", compute=compute)
        by_layer = [masks[pattern] for pattern in self.masks.patterns]
        slots = [CacheSlots(packed.positions)] * len(by_layer)
        ropes = self.model.rotations(packed.positions, end)
        context = ForwardContext(packed.positions, end, by_layer, slots, ropes)
        if self.model.value_embeddings is not None:
            tokens = packed.tokens[None]  # (1, N)
            context.token_values = self.model.value_embeddings(tokens, self.model.dtype)
        return context

    @torch.no_grad()
    def agrees_with_model(self) -> bool:
        """Whether a few reads have the logits that the model itself has for each row alone."""
        model = self.model
        n_rows, n_positions = PROVED_SHAPE
        n_positions = min(n_positions, model.config.max_cached_len)
        together = model.new_cache(n_rows, n_positions)
        alone = [model.new_cache(1, n_positions) for _ in range(n_rows)]
        for reads in PROVED_READS:
            rows: list[int] = []
            tokens: list[int] = []
            known = []
            for row, length in reads:
                length = min(length, n_positions - alone[row].lengths[0])
                new = [(7 * len(tokens) + at) % model.config.vocab_size for at in range(length)]
                if new:
                    rows += [row] * length
                    tokens += new
                    batch = torch.tensor([new], device=model.device)  # (1, length)
                    known.append(model(batch, cache=alone[row])[0])
            found = self.read(together, rows, tokens, range(len(tokens)))
            if not proof.has_near_logits(model, found, torch.cat(known)):
                return False
        return True


def new_reader(model: Thinker) -> tuple[PackedReader | None, str]:
    """A reader for a model that is prepared for inference, or None and the reason."""
    unknown = unsupported(model.config)
    if unknown:
        return None, f"packed reads do not know {unknown}"
    reader = PackedReader(model)
    if proof.is_fake(model):
        return reader, ""
    try:
        if reader.agrees_with_model():
            return reader, ""
    except Exception as error:  # of an edited module, or a card that it was not tried on
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        return None, f"packed reads failed: {first_line}"
    return None, "the model computes something else in packed reads"


def unsupported(config: ThinkerConfig) -> str:
    """What a PackedReader does not know of a model; "" if it knows all."""
    if config.prefix:
        return "a bidirectional prefix"
    cache = KVCache(config, 1, config.max_cached_len, "meta", torch.float32)
    if cache.tokens is not None:
        return "token shift, embeddings of pairs and attention by token"
    for layer, pattern in zip(cache.layers, config.patterns):
        if type(layer) is not LayerCache or pattern.by_score or pattern.by_content:
            return f"model.attention={pattern.text}"
    return ""


def _has_varlen(model: Thinker, masks: MaskBuilder) -> bool:
    """Whether torch's variable-length attention can read pieces of prompts."""
    if model.device.type != "cuda" or model.dtype not in (torch.bfloat16, torch.float16):
        return False
    is_plain = masks.plain_scores and not masks.has_bias
    if not is_plain or any(pattern != CAUSAL for pattern in masks.patterns):
        return False
    return torch.cuda.get_device_capability(model.device) >= (8, 0)


class _Packed:
    """The tokens of a pass on the device: first those that are alone in their row, then the rows
    with several, one after another.

    Attributes:
        tokens, rows, positions: (N,) each.
        wanted: the places of the tokens whose logits are wanted; None: all, in order.
        alone, pieces: the two groups of tokens; None: there are none.
    """

    def __init__(
        self,
        rows: list[int],
        positions: list[int],
        tokens: list[int] | Tensor,
        wanted: Sequence[int],
        device: torch.device,
    ) -> None:
        counts = Counter(rows)
        order = sorted(range(len(rows)), key=lambda at: rows[at] if counts[rows[at]] > 1 else -1)
        rows = [rows[at] for at in order]
        positions = [positions[at] for at in order]
        numbers = [rows, positions]
        if not isinstance(tokens, Tensor):
            numbers.append([tokens[at] for at in order])
        self.rows, self.positions, *others = to_device(numbers, device)
        self.tokens = others[0] if others else tokens

        place = {at: index for index, at in enumerate(order)}
        places = [place[at] for at in wanted]
        self.wanted: Tensor | None = None
        if places != list(range(len(rows))):
            self.wanted = to_device(places, device)

        n_alone = sum(count == 1 for count in counts.values())
        self.alone: _Group | None = None
        if n_alone:
            part = slice(0, n_alone)
            self.alone = _group_alone(part, rows[part], positions[part], self)
        self.pieces: _Group | None = None
        if n_alone < len(rows):
            part = slice(n_alone, len(rows))
            self.pieces = _group_pieces(part, rows[part], positions[part], self)


@dataclass
class _Group:
    """Tokens that are read alike: n tokens of P rows."""

    part: slice  # of the packed tokens
    positions: Tensor  # (n,)
    cache_rows: slice | Tensor  # (P,)
    row: Tensor  # (n,), the row of each token among these
    place: Tensor  # (n,), of each token among those of its row
    shape: tuple[int, int]  # P, and the most tokens of a row
    end: int  # one past the last position
    # Where each row starts if queries and keys of all rows are one after another, with the end:
    # (P + 1,) each; of pieces alone.
    starts: tuple[Tensor, Tensor] | None = None
    n_keys: int = 0


def _group_alone(part: slice, rows: list[int], positions: list[int], packed: _Packed) -> _Group:
    """The group of tokens that are alone in their row.

    Rows that are close together are read in place, with those between them.
    """
    first = min(rows)
    n_rows = max(rows) + 1 - first
    cache_rows: slice | Tensor = slice(first, first + n_rows)
    row = packed.rows[part] - first
    if n_rows > MAX_SPREAD * len(rows):
        n_rows = len(rows)
        cache_rows = packed.rows[part]
        row = torch.arange(n_rows, device=row.device)
    place = torch.zeros_like(row)
    end = max(positions) + 1
    return _Group(part, packed.positions[part], cache_rows, row, place, (n_rows, 1), end)


def _group_pieces(part: slice, rows: list[int], positions: list[int], packed: _Packed) -> _Group:
    """The group of tokens in rows with several."""
    counts = Counter(rows)
    numbers = {row: number for number, row in enumerate(counts)}
    places = [place for count in counts.values() for place in range(count)]
    row, place = to_device([[numbers[row] for row in rows], places], packed.rows.device)
    n_keys = dict(zip(rows, (position + 1 for position in positions)))  # the last of each row
    by_row = [
        [*counts, 0],
        list(accumulate(counts.values(), initial=0)),
        list(accumulate(n_keys.values(), initial=0)),
    ]
    cache_rows, query_starts, key_starts = to_device(by_row, packed.rows.device)
    return _Group(
        part,
        packed.positions[part],
        cache_rows[:-1],
        row,
        place,
        (len(counts), max(counts.values())),
        max(n_keys.values()),
        (query_starts, key_starts),
        by_row[2][-1],
    )


class _PaddedAttention:
    """Attention of a group whose rows are padded to the longest, by attend()."""

    def __init__(self, group: _Group, masks: MaskBuilder) -> None:
        self.group = group
        positions = group.positions.new_zeros(group.shape)  # (P, T); padding reads position 0
        positions[group.row, group.place] = group.positions
        keys = torch.arange(group.end, device=positions.device)
        self.masks: dict[Pattern, AttentionMask] = {}
        for pattern in dict.fromkeys(masks.patterns):
            self.masks[pattern] = masks.build(pattern, TokenInfo(positions), TokenInfo(keys))

    def __call__(
        self, pattern: Pattern, q: Tensor, keys: Tensor, values: Tensor, *options: object
    ) -> Tensor:
        """q (n, H, D), keys, values (rows, K, S, D) -> (n, H, D). `options`: of attend()."""
        group = self.group
        padded = q.new_zeros(*group.shape, *q.shape[1:])  # (P, T, H, D)
        padded[group.row, group.place] = q
        k = keys[:, :, : group.end][group.cache_rows]  # (P, K, end, D)
        v = values[:, :, : group.end][group.cache_rows]
        y = attend(padded.transpose(1, 2), k, v, self.masks[pattern], *options)  # (P, H, T, D)
        return y.transpose(1, 2)[group.row, group.place]


class _VarlenAttention:
    """Attention of pieces by torch's variable-length kernel, with packed keys."""

    def __init__(self, group: _Group) -> None:
        self.group = group
        query_starts, key_starts = group.starts
        n_keys = key_starts.diff()  # (P,)
        repeat = partial(torch.repeat_interleave, repeats=n_keys, output_size=group.n_keys)
        self.rows = repeat(group.cache_rows)  # (M,), of each key
        every_key = torch.arange(group.n_keys, device=n_keys.device)
        self.positions = every_key - repeat(key_starts[:-1])  # (M,)
        self.starts = (query_starts.int(), key_starts.int())
        self.kernel = VarlenRows(None)

    def __call__(
        self, pattern: Pattern, q: Tensor, keys: Tensor, values: Tensor, scale: float, *unused: None
    ) -> Tensor:
        """As _PaddedAttention, for plain causal attention."""
        k = keys[self.rows, :, self.positions]  # (M, K, D)
        v = values[self.rows, :, self.positions]
        longest = (self.group.shape[1], self.group.end)
        return self.kernel.attend(q, k, v, self.starts, longest, scale)


def _attend_by_group(
    groups: list[_PaddedAttention | _VarlenAttention],
    pattern: Pattern,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    *options: object,
) -> Tensor:
    """q (1, H, N, D), keys, values (rows, K, S, D) -> (1, H, N, D): a PreparedKernel."""
    q = q[0].transpose(0, 1)  # (N, H, D)
    parts = []
    for attention in groups:
        parts.append(attention(pattern, q[attention.group.part], keys, values, *options))
    return torch.cat(parts).transpose(0, 1)[None]


@dataclass
class _LayerOfRows:
    """A layer of a cache for a pass whose tokens belong to many rows."""

    layer: LayerCache
    rows: Tensor  # (N,)

    def update(
        self, q: Tensor, k: Tensor, v: Tensor, slots: CacheSlots
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Store new keys and values (1, K, N, D). Returns q and the tensors of the whole layer."""
        layer = self.layer
        positions = slots.slot_mapping
        layer.keys[self.rows, :, positions] = k[0].transpose(0, 1)
        layer.values[self.rows, :, positions] = v[0].transpose(0, 1)
        return q, layer.keys, layer.values


@dataclass
class _Layers:
    """What the model's blocks read of a cache."""

    layers: list[_LayerOfRows]
