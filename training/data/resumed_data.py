"""Tokenizer and corpus of a run that resumes: they must be those that it started with."""

import sys
from pathlib import Path

from thinker.checkpoint.run_directory import RunDirectory
from thinker.data.corpus.corpus import Corpus
from thinker.data.text.document import MissingData
from thinker.data.tokenizers.saved_tokenizer import load_tokenizer
from thinker.data.tokenizers.tokenizer import Tokenizer
from thinker.data.tokenizers.tokenizer_factory import is_path
from thinker.runtime.errors import UserError
from thinker.runtime.reading import read_text
from thinker.training.config.config import Config
from thinker.training.data.run_corpus import find_training_data, prepare_training_data
from thinker.training.settings.settings import Settings
from thinker.training.state.resume import REMEDY
from thinker.training.state.run_state import RunState


def own_tokenizer(run: RunDirectory, previous: Settings, config: Config) -> Tokenizer | None:
    """The run's copy of a tokenizer from a file or run.init_from; None for one made from the text.

    Raises UserError if the content of such a file has changed. Prints a line if the file is
    missing.
    """
    spec = config.data.tokenizer
    template = config.data.chat_template
    if not (config.run.init_from or template or is_path(spec)):
        return None
    was = previous.data
    own = load_tokenizer(run.path)
    if is_path(spec) and not _is_gone("tokenizer", spec, was.tokenizer):
        named = load_tokenizer(spec)
        if was.chat_template is not None:  # it replaced the tokenizer's own template
            named = named.with_chat_template(own.chat_template)
        _check_equal(own, named, f"data.tokenizer={spec}", run)
    has_template = template is not None and was.chat_template is not None
    if has_template and not _is_gone("chat_template", template, was.chat_template):
        named = own.with_chat_template(read_text(Path(template)))
        _check_equal(own, named, f"data.chat_template={template}", run)
    return own


def _is_gone(key: str, path: str, path_before: str | None) -> bool:
    """Whether a file that the run has a copy of is missing. Prints a line if so."""
    if path != path_before or Path(path).exists():
        return False
    print(f"data.{key}={path} does not exist; using the run's copy of it", file=sys.stderr)
    return True


def _check_equal(own: Tokenizer, named: Tokenizer, key: str, run: RunDirectory) -> None:
    if own.eos_ids[:-1] == named.eos_ids:
        from thinker.data.chat import chat

        named = chat.with_answer_end(named)  # as at the start of the run
    if named.content_hash != own.content_hash:
        raise UserError(f"{key} has changed since the run in {run.path} started; {REMEDY}")


def read_corpus(
    run: RunDirectory, state: RunState, config: Config, tokenizer: Tokenizer | None
) -> Corpus:
    """The corpus of the run. Its files may have moved, or be missing if the tokens are cached.

    Raises UserError if the text has changed since the run started.
    """
    data = config.data
    text = f"the text of {data.describe_text()}"
    try:
        corpus = prepare_training_data(config, tokenizer)
    except MissingData as error:
        if data.describe_text() != state.settings.data.describe_text():
            raise
        corpus = find_training_data(data, state.corpus, state.tokenizer)
        if corpus is None:
            cache = f"data.cache_dir={data.cache_dir} does not contain the tokens of the run either"
            raise UserError(f"{error}; {cache}") from error
        print(f"{text} does not exist; using the cached tokens of the run", file=sys.stderr)
    is_same_tokenizer = corpus.tokenizer.content_hash == state.tokenizer
    if is_same_tokenizer and corpus.train.has_conversations and corpus.sha256 != state.corpus:
        reason = "or this version of Thinker tokenizes conversations otherwise"
        raise UserError(
            f"{text} has changed since the run in {run.path} started, {reason}; {REMEDY}"
        )
    if not is_same_tokenizer or corpus.sha256 != state.corpus:
        raise UserError(f"{text} has changed since the run in {run.path} started; {REMEDY}")
    return corpus
