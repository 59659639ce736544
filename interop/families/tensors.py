"""The tensors of a model under the names and in the layout of its family, in both directions."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from thinker.checkpoint import CorruptCheckpoint
from thinker.interop.families.family import Family
from thinker.interop.families.layouts import Layout, Rows, channel_order, reorder_channels
from thinker.interop.families.tensor_files import DTYPES, TensorFiles, with_own_storage
from thinker.model import ThinkerConfig
from thinker.runtime.errors import UserError

IN_BLOCK = re.compile(r"blocks\.(\d+)\.(.+)")
# Tensors with channels that RoPE rotates in pairs.
ROTATED = re.compile(r"blocks\.\d+\.attention\.[qk]_(proj|norm)\..+")


@dataclass
class Group:
    """Tensors of ours that are stored together."""

    layout: Layout
    theirs: list[str]
    ours: list[str] = field(default_factory=list)


def group_tensors(family: Family, config: ThinkerConfig, names: Iterable[str]) -> list[Group]:
    """Our tensors as they are stored together. Raises UserError for a module that the family does
    not have."""
    groups: dict[str, Group] = {}
    for name in names:
        prefix, module, leaf = _split_name(family, name)
        if module not in family.names:
            raise UserError(f"{family.model_type} has no place for {name}")
        theirs = family.names[module]
        key = f"{prefix}{theirs}.{leaf}"
        if key not in groups:
            stored = [key]
            if "{head}" in key:
                n_heads = config.n_heads if module.endswith("q_norm") else config.n_kv_heads
                stored = [key.replace("{head}", str(head)) for head in range(n_heads)]
            groups[key] = Group(family.layouts.get(theirs, Rows()), stored)
        groups[key].ours.append(name)
    return list(groups.values())


def _split_name(family: Family, name: str) -> tuple[str, str, str]:
    """Their prefix of the layer, or "", and our names of the module in it and of the tensor."""
    module, _, leaf = name.rpartition(".")
    prefix = ""
    match = IN_BLOCK.fullmatch(module)
    if match is not None:
        prefix = f"{family.names['blocks']}.{match[1]}."
        module = match[2]
    return prefix, module, leaf


def to_their_tensors(
    family: Family, config: ThinkerConfig, tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Our tensors under the names of the family, in its layout."""
    found = {}
    for group in group_tensors(family, config, tensors):
        parts = []
        for name in group.ours:
            parts.append(to_their_order(family, config, name, tensors[name].detach()))
        for name, tensor in zip(group.theirs, group.layout.join(parts, config)):
            found[name] = tensor
    return found


def read_their_tensors(
    family: Family,
    config: ThinkerConfig,
    files: TensorFiles,
    like: Mapping[str, Tensor],
    folder: object,
) -> dict[str, Tensor]:
    """Read our tensors in fp32 from their files.

    like: tensors of the shapes that are wanted, by our names. folder: for messages. Raises
    CorruptCheckpoint if one is missing or does not fit, UserError if one has no place.
    """
    groups = group_tensors(family, config, like)
    renamed = _stored_names(family, files.names())
    _check_names(family, renamed, groups, config, folder)
    found = {}
    for group in groups:
        meta = [like[name].to("meta") for name in group.ours]
        stored = []
        for name, wanted in zip(group.theirs, group.layout.join(meta, config)):
            stored.append(_read(files, renamed[name], name, list(wanted.shape)))
        sizes = [like[name].shape for name in group.ours]
        for name, tensor in zip(group.ours, group.layout.split(stored, sizes, config)):
            tensor = to_our_order(family, config, name, tensor).contiguous()
            if len(group.ours) > 1:  # perhaps a view of the fused tensor
                tensor = with_own_storage(tensor)
            found[name] = tensor
    return found


def to_our_order(family: Family, config: ThinkerConfig, name: str, tensor: Tensor) -> Tensor:
    """A tensor of queries or keys with the channels of each head in our order; others unchanged."""
    order = channel_order(config, family.rotates_neighbors)
    if order is None or not ROTATED.fullmatch(name):
        return tensor
    return reorder_channels(tensor, order.to(tensor.device), config.head_dim)


def to_their_order(family: Family, config: ThinkerConfig, name: str, tensor: Tensor) -> Tensor:
    """The inverse of to_our_order()."""
    order = channel_order(config, family.rotates_neighbors)
    if order is None or not ROTATED.fullmatch(name):
        return tensor
    return reorder_channels(tensor, order.argsort().to(tensor.device), config.head_dim)


def _read(files: TensorFiles, stored_name: str, name: str, shape: list[int]) -> Tensor:
    dtype, found = files.form(stored_name)
    if dtype not in DTYPES or found != shape:
        wanted = f"it must be F32, BF16 or F16 {shape}"
        raise CorruptCheckpoint(f"{files.place(stored_name)}: {name} is {dtype} {found}; {wanted}")
    return files.read(stored_name)


def _stored_names(family: Family, names: set[str]) -> dict[str, str]:
    """The name in the files of each tensor. Old files leave out the prefix that all modules but the
    LM head have, such as "transformer."."""
    embedding = f"{family.names['embedding']}.weight"
    parts = embedding.split(".")
    for n_left_out in range(1, len(parts) - 1):
        prefix = ".".join(parts[:n_left_out]) + "."
        if embedding not in names and embedding.removeprefix(prefix) in names:
            head = f"{family.names['lm_head']}."
            in_full = {prefix + name: name for name in names if not name.startswith(head)}
            return in_full | {name: name for name in names if name.startswith(head)}
    return {name: name for name in names}


def _check_names(
    family: Family,
    stored: Mapping[str, str],
    groups: list[Group],
    config: ThinkerConfig,
    folder: object,
) -> None:
    """Raise an error if a tensor is missing, or has no place."""
    wanted = set(itertools.chain.from_iterable(group.theirs for group in groups))
    for name in sorted(wanted):
        if name not in stored:
            raise CorruptCheckpoint(f"{folder} has no tensor {name}")
    tied_head = f"{family.names['lm_head']}.weight"
    for name in sorted(stored):
        may_be_unused = config.tie_embeddings and name == tied_head
        if name not in wanted and not may_be_unused and not name.endswith(family.buffers):
            raise UserError(
                f"{folder} has an unknown tensor {name}, which is not part of {family.model_type}"
            )


def their_name(family: Family, name: str) -> str:
    """Their name of one of our parameters, or of one in a module such as a LoRA adapter.

    Raises UserError if it is stored in another layout, so that it has no name of its own there.
    """
    prefix, module, leaf = _split_name(family, name)
    theirs = family.names.get(module)
    n_modules = list(family.names.values()).count(theirs)
    if theirs is None or n_modules > 1 or theirs in family.layouts:
        raise UserError(
            f"{family.model_type} stores {module} together with others, or in another layout"
        )
    return f"{prefix}{theirs}.{leaf}"
