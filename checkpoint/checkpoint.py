"""Checkpoints: a folder of safetensors and JSON that is either whole or not there.

A checkpoint is written under a temporary name, flushed to the disk, listed with its sizes and sha256 sums in a
manifest, and only then renamed. Nothing is ever unpickled.

    step-00000500/                      best-00000400/, nonfinite-00000512/
        config.json          the model's shape           config.json
        model.safetensors    its weights                 model.safetensors
        training.safetensors the optimizer's             state.json
        state.json           all else that decides       manifest.json
        manifest.json        {file: [bytes, sha256]}

Where many ranks train a large model, both files of tensors are instead one file a rank: see storage/sharded.py.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from thinker.checkpoint import sharded
from thinker.model import Thinker, ThinkerConfig
from thinker.model.lora import RANK_OF, add_lora, merge_lora
from thinker.runtime.errors import UserError
from thinker.runtime.process_group import SINGLE_PROCESS, DistContext, full_tensor

MANIFEST = "manifest.json"
MODEL, TRAINING = "model.safetensors", "training.safetensors"
KINDS = "(?:step|best|bad)"
JSON_BYTES = 1 << 24  # no JSON of ours is larger; a file from a stranger shall not fill the memory
DTYPES = {torch.float32: "F32", torch.uint8: "U8"}  # as safetensors calls them; U8 was the random state
PIECE = 1 << 18  # bytes that are written and hashed at once

Files = dict[str, dict[str, Any]]  # a checkpoint's files by name: tensors, or what JSON can hold


class CorruptCheckpoint(UserError):
    """A checkpoint that is not whole; the message names the file."""


def save(folder: Path, model: Thinker, state: dict[str, Any], training: dict[str, Tensor] | None = None) -> None:
    """Write a checkpoint; see contents() and write()."""
    write(folder, contents(model, state, training))


def contents(model: Thinker, state: dict[str, Any], training: dict[str, Tensor] | None = None) -> Files:
    """The files of a checkpoint, its tensors being the live ones.

    Args:
        state: what JSON can hold: step, tokens, losses.
        training: the tensors that resuming needs; left out, the checkpoint is for sampling only.
    """
    files = {"config.json": model.config.to_dict(), MODEL: model_tensors(model), "state.json": state}
    return files if training is None else files | {TRAINING: training}


def copied(files: Files, dist: DistContext = SINGLE_PROCESS, always: bool = True) -> Files:
    """The same, all tensors whole and in the host's memory, where training may go on while they are written.

    Args:
        dist: those that share tensors, which must all ask; only rank 0 gets something.
        always: copy what is there already, too.
    """
    found: Files = {}
    for name, file in files.items():
        if not _holds_tensors(name):
            found[name] = file
            continue
        found[name] = {}
        for key, tensor in file.items():
            gathered = full_tensor(tensor.detach())  # one after the other: there may be no room for all
            if dist.is_main:
                found[name][key] = gathered.to("cpu", copy=always and not hasattr(tensor, "to_local"))
    return found


def write(
    folder: Path,
    files: Files,
    rest: Callable[[float], None] = lambda seconds: None,
    shared_by: DistContext | None = None,
) -> None:
    """Write files so that `folder` appears whole or not at all; a folder of that name is replaced.

    Args:
        rest: called after every piece with the seconds it took; it may wait, so that others come to their turn.
        shared_by: ranks that all call this, each to write its part of the tensors into a file of its own.

    Raises OSError where the disk is full; nothing of the attempt stays.
    """
    temporary, listed = folder.with_name(f".{folder.name}.tmp"), {}
    first = shared_by is None or shared_by.is_main
    try:
        if first:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir()
        if shared_by is not None:
            shared_by.broadcast_object()  # the folder is there
            tensors = {key: part for name, file in files.items() if _holds_tensors(name) for key, part in file.items()}
            own = sharded.write(temporary, tensors, shared_by)
            told = shared_by.gather_objects({path.name: [path.stat().st_size, _sha256(path)] for path in own})
            listed = {name: sums for each in told for name, sums in each.items()}
            files = {name: file for name, file in files.items() if not _holds_tensors(name)}
        if not first:
            return
        listed |= {name: _write(temporary / name, files[name], rest) for name in sorted(files)}
        _write(temporary / MANIFEST, dict(sorted(listed.items())), rest)
        flush(temporary)
        replaced = folder.with_name(f".{folder.name}.replaced")
        if folder.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            folder.rename(replaced)  # clear() puts it back, should this process end before the next line
        temporary.rename(folder)
        flush(folder.parent)
        shutil.rmtree(replaced, ignore_errors=True)
    except BaseException:
        if first:
            shutil.rmtree(temporary, ignore_errors=True)
        raise


def model_tensors(model: Thinker) -> dict[str, Tensor]:
    """The parameters by name; a tied head is left out, being the embedding."""
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    if model.config.tie_embeddings:
        del tensors["lm_head.weight"]
    return tensors


def verify(folder: Path) -> None:
    """Compare every file with the manifest. Raises CorruptCheckpoint that names the first that differs."""
    manifest = read_json(folder / MANIFEST)
    for name, listed in manifest.items():
        kinds = [type(value) for value in listed] if isinstance(listed, list) else None
        if not re.fullmatch(r"\w[\w.-]{0,99}", name, re.ASCII) or kinds != [int, str]:
            raise CorruptCheckpoint(f"{folder / MANIFEST} is not as it was written")
    try:
        whole = (folder / MANIFEST).read_bytes() == _json(manifest)
    except OSError as error:
        raise CorruptCheckpoint(f"{folder / MANIFEST} cannot be read: {error.strerror}") from error
    if not whole:
        raise CorruptCheckpoint(f"{folder / MANIFEST} is not as it was written")
    needed = ["config.json", "state.json"]
    if not any(name.startswith("shard-") for name in manifest):
        needed += [MODEL, TRAINING] if folder.name.startswith("step-") else [MODEL]
    if missing := [name for name in needed if name not in manifest]:
        raise CorruptCheckpoint(f"{folder / MANIFEST} does not list {missing[0]}")
    for name, listed in manifest.items():
        path = folder / name
        if path.is_symlink() or not path.is_file():
            raise CorruptCheckpoint(f"{path} is missing, or a link instead of a file")
        try:
            found = [path.stat().st_size, _sha256(path)]
        except OSError as error:
            raise CorruptCheckpoint(f"{path} cannot be read: {error.strerror}") from error
        if found != listed:
            raise CorruptCheckpoint(f"{path} is not as it was written: its size or sha256 is another")
    number = re.fullmatch(rf"{KINDS}-(\d+)", folder.name)
    if number and read_json(folder / "state.json").get("step") != int(number[1]):
        raise CorruptCheckpoint(f"{folder / 'state.json'} is of another step")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises CorruptCheckpoint where it is missing or is none."""
    try:
        if not path.is_file():
            raise CorruptCheckpoint(f"{path} is missing")
        if path.stat().st_size > JSON_BYTES:
            raise CorruptCheckpoint(f"{path} is larger than any file of its kind")
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError, OSError) as error:
        raise CorruptCheckpoint(f"{path} cannot be read as JSON") from error
    if not isinstance(value, dict):
        raise CorruptCheckpoint(f"{path} is not a JSON object")
    return value


def read_tensors(path: Path, expected: dict[str, Tensor | None] | None = None) -> dict[str, Tensor]:
    """The tensors of a safetensors file.

    Its header is compared first with the names, shapes and types of `expected`, if given: no tensor is loaded for
    nothing. One expected as None may be anything, and is left out. Raises CorruptCheckpoint if a file is missing,
    broken, or another.
    """
    with opened(path) as file:
        names = [name for name in file.keys() if not expected or expected.get(name, name) is not None]  # noqa: SIM118
        if expected is not None:
            slices = {name: file.get_slice(name) for name in names}
            found = {name: (part.get_dtype(), *part.get_shape()) for name, part in slices.items()}
            wanted = {name: like for name, like in expected.items() if like is not None}
            _compare(path, found, {name: (DTYPES[like.dtype], *like.shape) for name, like in wanted.items()})
        return {name: file.get_tensor(name) for name in names}


def read(folder: Path, name: str, expected: dict[str, Tensor | None]) -> dict[str, Tensor]:
    """As read_tensors(), the tensors of a checkpoint's file of this name, or of the files that its ranks wrote instead.

    `expected` may be tensors that the ranks share: then each rank reads its own rows, into these.
    """
    if not sharded.is_sharded(folder) and not any(hasattr(like, "to_local") for like in expected.values()):
        return read_tensors(folder / name, expected)
    wanted = {key: like for key, like in expected.items() if like is not None}
    found = {key: shape for key, shape in header(folder, name).items() if expected.get(key, key) is not None}
    _compare(folder, found, {key: (DTYPES[like.dtype], *like.shape) for key, like in wanted.items()})
    try:
        return sharded.read(folder, wanted)
    except sharded.IncompleteShards as error:
        raise CorruptCheckpoint(str(error)) from error


def header(folder: Path, name: str = MODEL) -> dict[str, tuple]:
    """Type and shape of each tensor in a checkpoint's file of this name, or what its ranks wrote instead.

    Raises CorruptCheckpoint where that is missing or broken.
    """
    if not sharded.is_sharded(folder):
        with opened(folder / name) as file:
            parts = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118
            return {key: (part.get_dtype(), *part.get_shape()) for key, part in parts.items()}
    try:
        found = sharded.header(folder)
    except sharded.IncompleteShards as error:
        raise CorruptCheckpoint(str(error)) from error
    ours = {key: shape for key, shape in found.items() if key.startswith("optimizer.") == (name == TRAINING)}
    return {key: (DTYPES.get(dtype, str(dtype)), *shape) for key, (dtype, shape) in ours.items()}


def lora_rank(folder: Path) -> int | None:
    """The rank of a checkpoint's adapters, None where it has none. Raises CorruptCheckpoint as header()."""
    shape = header(folder).get(RANK_OF)
    return None if shape is None else max(1, *shape[1:2])


def load_thinker(folder: Path, device: torch.device | str = "cpu") -> Thinker:
    """The model of a checkpoint, adapters merged, ready to sample from.

    Raises CorruptCheckpoint or UserError where files and shape disagree.
    """
    config = ThinkerConfig.from_dict(read_json(folder / "config.json"))
    if config.n_layers > len(header(folder)):  # or building so many blocks could take for ever
        raise CorruptCheckpoint(
            f"{folder / MODEL} has fewer tensors than its configuration has layers ({config.n_layers})"
        )
    with torch.device("meta"):
        model = Thinker(config)  # no memory and no random numbers for weights that are about to be replaced
    rank = lora_rank(folder)
    if rank:
        add_lora(model, rank)
    load_weights(model, folder, assign=True)
    if rank:
        merge_lora(model)
    return model.to(device).eval()


def load_weights(model: Thinker, folder: Path, assign: bool = False) -> None:
    """Put the weights in `folder` into the model, after checking all names and shapes; raises CorruptCheckpoint.

    They are copied into the parameters, or with `assign` become the parameters.
    """
    tensors = read(folder, MODEL, model_tensors(model))
    model.load_state_dict(tensors, strict=not model.config.tie_embeddings, assign=assign)
    if model.config.tie_embeddings:
        model.lm_head.weight = model.embedding.weight


def remove(folder: Path) -> None:
    """Delete a checkpoint: first out of sight, so that a crash meanwhile leaves no half of one."""
    hidden = folder.with_name(f".{folder.name}.removed")
    shutil.rmtree(hidden, ignore_errors=True)
    folder.rename(hidden)
    shutil.rmtree(hidden)


def quarantine(folder: Path, prefix: str) -> None:
    """Take a checkpoint out of the sequence, to PREFIX-NAME beside it: nothing of it is deleted."""
    aside = folder.with_name(f"{prefix}-{folder.name}")
    shutil.rmtree(aside, ignore_errors=True)
    folder.rename(aside)


def clear(folder: Path) -> None:
    """Tidy up after a process that was killed while writing or removing; nobody else may be writing."""
    for path in folder.glob(".*"):
        hidden = re.fullmatch(rf"\.({KINDS}-\d+)\.(?:\d+\.)?(tmp|removed|replaced)", path.name)
        if hidden and hidden[2] == "replaced" and not (folder / hidden[1]).exists():
            path.rename(folder / hidden[1])
        elif hidden:
            shutil.rmtree(path, ignore_errors=True)


def list_checkpoints(folder: Path, kind: str = "step") -> list[Path]:
    """The checkpoints step-N (or best-N) in a folder, oldest first, whole or not."""
    named = list(folder.glob(f"{kind}-*"))
    folders = [path for path in named if path.is_dir() and not path.is_symlink()]
    if not all(map(os.path.lexists, named)):  # a training at work has just removed one, and made another
        return list_checkpoints(folder, kind)
    found = [(int(m[1]), path) for path in folders if (m := re.fullmatch(rf"{kind}-(\d+)", path.name))]
    return [path for _, path in sorted(found)]


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Any]:
    """A safetensors file, open. Raises CorruptCheckpoint where it is missing or broken."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except FileNotFoundError as error:
        raise CorruptCheckpoint(f"{path} is missing") from error
    except (SafetensorError, OSError, RuntimeError) as error:  # the last where it goes while it is mapped
        raise CorruptCheckpoint(f"{path} is no whole safetensors file") from error


def _holds_tensors(name: str) -> bool:
    return name.endswith(".safetensors")


def _compare(path: Path, found: dict[str, tuple], expected: dict[str, tuple]) -> None:
    if found != expected:
        name = min(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
        has, asks = (" ".join(map(str, each[name])) if name in each else "nothing" for each in (found, expected))
        raise CorruptCheckpoint(f"{path} has {name} as {has} where {asks} belongs")


def _json(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=1) + "\n").encode()


def _write(path: Path, file: dict[str, Any], rest: Callable[[float], None]) -> list[int | str]:
    """Write one file through to the disk. Returns its size and sha256."""
    digest = hashlib.sha256()
    with path.open("wb") as out:
        for piece in _safetensors(file) if _holds_tensors(path.name) else (_json(file),):
            start = time.perf_counter()
            out.write(piece)
            digest.update(piece)
            rest(time.perf_counter() - start)
        out.flush()
        os.fsync(out.fileno())
        return [out.tell(), digest.hexdigest()]


def _safetensors(tensors: dict[str, Tensor]) -> Iterator[bytes | memoryview]:
    """A safetensors file in pieces: a header of names, types, shapes and places, and the numbers of one after another.

    The library would write it in one go, in which no one else has a turn, and hashing would have to read it again.
    """
    header, end = {}, 0
    tensors = dict(sorted(tensors.items()))  # the same bytes, in whatever order they came to be
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for tensor in tensors.values():
        numbers = memoryview(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
        for start in range(0, len(numbers), PIECE):
            yield numbers[start : start + PIECE]


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def flush(path: Path) -> None:
    """fsync a file, or a folder's list of names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some file systems cannot sync a folder
            raise
    finally:
        os.close(descriptor)
