"""What may not change when a run goes on: whatever decides what its weights mean and which batch comes next."""

from __future__ import annotations

from data.tokenizer import Tokenizer
from errors import UserError
from storage.checkpoint import list_checkpoints
from storage.run_directory import RunDirectory
from training.recipe import Recipe

ONLY = {"optimizer": ("name",), "run": ("seed",), "train": ("batch_size",)}  # of these sections; of others every key


def refuse_changes(run: RunDirectory, recipe: Recipe, *sections: str) -> None:
    """Raise UserError, naming the key, where it differs from the run that was begun in that directory."""
    before, now = run.read_config(), recipe.model_dump(mode="json")
    if before is None or not list_checkpoints(run.checkpoints):
        return
    for section in sections:
        for key, value in now[section].items():
            then = before.get(section, {}).get(key)
            if key in ONLY.get(section, (key,)) and value != then and key != "cache_dir":
                raise UserError(
                    f"{section}.{key} is {value!r}, but the run in {run.path} was begun with {then!r}; "
                    "put it back, choose another run.dir, or remove that folder to begin anew"
                )


def refuse_another_tokenizer(run: RunDirectory, tokenizer: Tokenizer) -> None:
    """Raise UserError where the text has changed so that ids would mean other words than the weights know."""
    begun = any(list_checkpoints(run.checkpoints, kind) for kind in ("step", "best"))
    if begun and Tokenizer.load(run.path).content_hash != tokenizer.content_hash:
        raise UserError(
            f"the text has changed, and with it the tokenizer, since the run in {run.path} was begun; "
            "put it back, or choose another run.dir"
        )
