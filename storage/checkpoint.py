"""Checkpoints: a folder of safetensors and JSON that is either whole or not there.

A checkpoint is written under a temporary name, flushed to the disk, listed with its sizes and sha256 sums in a
manifest, and only then renamed. Nothing is ever unpickled.

    step-00000500/                      best-00000400/
        config.json          the model's shape           config.json
        model.safetensors    its weights                 model.safetensors
        training.safetensors optimizer, random state     state.json
        state.json           step, tokens, time, ...     manifest.json
        manifest.json        {file: [bytes, sha256]}
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from errors import UserError
from model import Thinker, ThinkerConfig

MANIFEST = "manifest.json"


class Damaged(UserError):
    """A checkpoint that is not whole; the message names the file."""


def save(folder: Path, thinker: Thinker, state: dict[str, Any], training: dict[str, Tensor] | None = None) -> None:
    """Write a checkpoint so that `folder` appears whole or not at all; one that was there before is replaced.

    Args:
        state: what JSON can hold: step, tokens, losses.
        training: the tensors that resuming needs; left out, the checkpoint is for sampling only.

    Raises OSError where the disk is full; nothing of the attempt stays.
    """
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        _write_json(temporary / "config.json", thinker.config.to_dict())
        _write_tensors(temporary / "model.safetensors", model_tensors(thinker))
        if training is not None:
            _write_tensors(temporary / "training.safetensors", training)
        _write_json(temporary / "state.json", state)
        files = sorted(path for path in temporary.iterdir())
        _write_json(temporary / MANIFEST, {path.name: [path.stat().st_size, _sha256(path)] for path in files})
        for path in (*files, temporary / MANIFEST, temporary):
            _flush(path)
        if folder.exists():  # only ever the same step again
            remove(folder)
        temporary.rename(folder)
        _flush(folder.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def model_tensors(thinker: Thinker) -> dict[str, Tensor]:
    """The parameters by name; a tied head is left out, being the embedding."""
    tensors = {name: tensor.contiguous() for name, tensor in thinker.state_dict().items()}
    if thinker.config.tie_embeddings:
        del tensors["head.weight"]
    return tensors


def verify(folder: Path) -> None:
    """Compare every file with the manifest. Raises Damaged, naming the first file that is not as it was written."""
    manifest = read_json(folder / MANIFEST)
    if not manifest:
        raise Damaged(f"{folder / MANIFEST} is empty")
    for name, listed in manifest.items():
        path = folder / name
        if Path(name).name != name or not isinstance(listed, list) or len(listed) != 2:
            raise Damaged(f"{folder / MANIFEST} is damaged")
        if not path.is_file():
            raise Damaged(f"{path} is missing")
        if path.stat().st_size != listed[0] or _sha256(path) != listed[1]:
            raise Damaged(f"{path} is not as it was written")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises Damaged where it is missing or is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise Damaged(f"{path} is missing") from error
    except (ValueError, OSError) as error:
        raise Damaged(f"{path} cannot be read as JSON") from error
    if not isinstance(value, dict):
        raise Damaged(f"{path} is not a JSON object")
    return value


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file. Raises Damaged where it is missing or broken."""
    try:
        return load_file(path)
    except FileNotFoundError as error:
        raise Damaged(f"{path} is missing") from error
    except (SafetensorError, OSError) as error:
        raise Damaged(f"{path} is no whole safetensors file") from error


def load_thinker(folder: Path, device: torch.device | str = "cpu") -> Thinker:
    """The model of a checkpoint, ready to sample from. Raises Damaged or UserError where files and shape disagree."""
    config = ThinkerConfig.from_dict(read_json(folder / "config.json"))
    tensors = read_tensors(folder / "model.safetensors")
    with torch.device("meta"):
        thinker = Thinker(config)  # no memory and no random numbers for weights that are about to be replaced
    load_weights(thinker, tensors, folder, assign=True)
    return thinker.to(device).eval()


def load_weights(thinker: Thinker, tensors: dict[str, Tensor], folder: Path, assign: bool = False) -> None:
    """Put the tensors of `folder` into the model, after checking all names and shapes; raises Damaged.

    They are copied into the parameters, or with `assign` become the parameters.
    """
    expected = {name: tuple(tensor.shape) for name, tensor in thinker.state_dict().items()}
    if thinker.config.tie_embeddings:
        del expected["head.weight"]
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if found != expected:
        name = min(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
        raise Damaged(
            f"{folder / 'model.safetensors'} has {name} as {found.get(name, 'nothing')} where its configuration "
            f"asks for {expected.get(name, 'nothing')}"
        )
    thinker.load_state_dict(tensors, strict=not thinker.config.tie_embeddings, assign=assign)
    if thinker.config.tie_embeddings:
        thinker.head.weight = thinker.embedding.weight


def remove(folder: Path) -> None:
    """Delete a checkpoint: first out of sight, so that a crash meanwhile leaves no half of one."""
    hidden = folder.with_name(f".{folder.name}.removed")
    shutil.rmtree(hidden, ignore_errors=True)
    folder.rename(hidden)
    shutil.rmtree(hidden)


def set_aside(folder: Path) -> None:
    """Take a damaged checkpoint out of the sequence, to damaged-NAME beside it: nothing of it is deleted."""
    aside = folder.with_name(f"damaged-{folder.name}")
    shutil.rmtree(aside, ignore_errors=True)
    folder.rename(aside)


def clear(folder: Path) -> None:
    """Remove what a process that was killed while writing left among the checkpoints; nobody else may be writing."""
    for path in folder.glob(".*"):
        if re.fullmatch(r"\.(step|best)-\d+\.(\d+\.tmp|removed)", path.name):
            shutil.rmtree(path, ignore_errors=True)


def list_checkpoints(folder: Path, kind: str = "step") -> list[Path]:
    """The checkpoints step-N (or best-N) in a folder, oldest first, whole or not."""
    found = [(int(m[1]), p) for p in folder.glob(f"{kind}-*") if (m := re.fullmatch(rf"{kind}-(\d+)", p.name))]
    return [path for _, path in sorted(found)]


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def _write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    try:
        save_file(tensors, path)
    except SafetensorError as error:  # written by Rust, which puts the errno into words
        code = re.search(r"os error (\d+)", str(error))
        if code is None:
            raise
        raise OSError(int(code[1]), os.strerror(int(code[1])), str(path)) from error


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _flush(path: Path) -> None:
    """fsync a file, or a folder's list of names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some file systems cannot sync a folder
            raise
    finally:
        os.close(descriptor)
