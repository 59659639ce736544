"""The text that a run was validated on, found again from its folder."""

from __future__ import annotations

from pathlib import Path

from data.make_tokenizer import load_tokenizer
from data.shards import TokenSet
from data.tokenizer import Tokenizer
from errors import UserError
from storage.load import run_of
from training.loop import prepare_data
from training.recipe import Recipe, load_recipe


def recipe_of(folder: Path) -> Recipe | None:
    """Of the run that a model lies in; None where it lies in none."""
    run = run_of(folder)
    return None if run is None else load_recipe(run / "config.yaml", [])


def held_out(folder: Path, tokenizer: Tokenizer, option: str) -> tuple[Recipe, TokenSet]:
    """The run's recipe, and its validation tokens; what is not there any more is made again.

    Raises UserError where the folder lies in no run, or its text is not that of the training any more; `option` is what
    names another text.
    """
    recipe = recipe_of(folder)
    if recipe is None:
        raise UserError(f"{folder} lies in no run directory, whose text could be taken; say which with {option}")
    own = recipe.run.init_from is not None or recipe.data.chat_template is not None
    corpus = prepare_data(recipe, tokenizer if own else None)
    if corpus.tokenizer.content_hash != load_tokenizer(run_of(folder)).content_hash:
        raise UserError(f"the text of data.source={recipe.data.source} is not that of the training; give {option}")
    return recipe, corpus.val
