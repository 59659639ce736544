"""Tokenizer and text of a resumed run, whose files may have moved or be missing."""

import sys
from pathlib import Path

from thinker.checkpoint.run_directory import RunDirectory
from thinker.data.corpus.corpus import Corpus
from thinker.data.text.document import MissingData
from thinker.data.tokenizers.tokenizer import Tokenizer
from thinker.data.tokenizers.tokenizer_factory import is_path, load_tokenizer
from thinker.runtime.errors import UserError
from thinker.runtime.reading import read_text
from thinker.training.config.config import Config
from thinker.training.resume import REMEDY
from thinker.training.run_state import RunState
from thinker.training.settings.settings import Settings
from thinker.training.training_data import find_training_data, prepare_training_data


def own_tokenizer(run: RunDirectory, previous: Settings | None, config: Config) -> Tokenizer | None:
    """The run's copy of a tokenizer from a file or run.init_from; None for a new run or a tokenizer made from the text.

    Raises UserError if the content of such a file has changed. Prints a line if the file is missing.
    """
    spec, template = config.data.tokenizer, config.data.chat_template
    if previous is None or not (config.run.init_from or template or is_path(spec)):
        return None
    own, was = load_tokenizer(run.path), previous.data
    if is_path(spec) and not _is_gone("tokenizer", spec, was.tokenizer):
        named = load_tokenizer(spec)
        if was.chat_template is not None:  # it replaced the tokenizer's own template
            named = named.with_chat_template(own.chat_template)
        _check_equal(own, named, f"data.tokenizer={spec}", run)
    if None not in (template, was.chat_template) and not _is_gone(
        "chat_template", template, was.chat_template
    ):
        _check_equal(
            own,
            own.with_chat_template(read_text(Path(template))),
            f"data.chat_template={template}",
            run,
        )
    return own


def read_corpus(
    run: RunDirectory, state: RunState, config: Config, tokenizer: Tokenizer | None
) -> Corpus:
    """The corpus of a run. If the run is resumed, its files may have moved, or be missing if the tokens are cached.

    Raises UserError if the text has changed since the run started.
    """
    data, was = config.data, state.settings and state.settings.data
    text = f"the text of {data.describe_text()}"
    try:
        corpus = prepare_training_data(config, tokenizer)
    except MissingData as error:
        if was is None or data.describe_text() != was.describe_text():
            raise
        corpus = find_training_data(data, state.corpus, state.tokenizer)
        if corpus is None:
            cache = f"data.cache_dir={data.cache_dir} does not contain the tokens of the run either"
            raise UserError(f"{error}; {cache}") from error
        print(f"{text} does not exist; using the cached tokens of the run", file=sys.stderr)
    if was is not None and (corpus.tokenizer.content_hash, corpus.sha256) != (
        state.tokenizer,
        state.corpus,
    ):
        raise UserError(f"{text} has changed since the run in {run.path} started; {REMEDY}")
    return corpus


def _is_gone(key: str, path: str, path_before: str | None) -> bool:
    if path != path_before or Path(path).exists():
        return False
    print(f"data.{key}={path} does not exist; using the run's copy of it", file=sys.stderr)
    return True


def _check_equal(own: Tokenizer, named: Tokenizer, key: str, run: RunDirectory) -> None:
    if named.content_hash != own.content_hash:
        raise UserError(f"{key} has changed since the run in {run.path} started; {REMEDY}")
