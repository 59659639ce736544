"""The section `data` of a config."""

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from thinker.data.text.sources import SOURCES
from thinker.runtime.constants import MAX_SIZE
from thinker.training.config.shipped import find_template
from thinker.training.config.source_section import TextSource
from thinker.training.config.types import PathText, with_feature_keys

DEFAULT_SEQ_LEN = 256


@with_feature_keys("data")
class DataConfig(TextSource):
    """The corpus, the tokenizer, and how tokens are packed into sequences. source is tales if it is
    omitted."""

    tokenizer: PathText | None = None
    """Tokenizer name, such as char or bpe:4096, or path. null: the tokenizer of run.init_from, or
    else bpe:4096."""
    seq_len: Annotated[int, Field(ge=2, le=MAX_SIZE)] = DEFAULT_SEQ_LEN
    """Tokens per sequence. If omitted, capped at model.max_seq_len or the context length of
    run.init_from."""
    packing: Literal["contiguous", "documents", "best_fit"] = "contiguous"
    """contiguous: cut anywhere (conversations: as documents). documents: whole documents in order.
    best_fit: in any order, less padding."""
    shift_windows: bool = False
    """With contiguous packing, cut the stream at other positions in each epoch after the first."""
    assistant_only_loss: bool = False
    """Compute the loss only on the assistant's messages in conversations."""
    chat_template: PathText | None = None
    """Jinja file with the chat template, or chat.jinja, which comes with Thinker. null: the
    template of the tokenizer."""
    document_masking: bool = False
    """Let tokens attend only within their own document, and restart positions at each document."""
    val_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.05
    """Fraction of documents held out for validation. Has no effect with val_tokens or
    source: tokens."""
    val_tokens: PathText | None = None
    """File of GPT-2 tokens for the validation split (docs/guides/gpu.md). Its documents are
    excluded from training."""
    num_workers: Annotated[int, Field(ge=0, le=64)] = 1
    """Number of threads that prepare batches ahead of time. 0: prepare each batch when it is
    needed."""
    cache_dir: PathText = ".cache"
    """Folder of the token cache."""

    @field_validator("chat_template")
    @classmethod
    def _find_template(cls, path: str | None) -> str | None:
        return find_template(path)

    @property
    def val_packing(self) -> str:
        """The packing of the validation split: whole documents for tales, whose entropy is
        known."""
        return "documents" if self.source == "tales" else self.packing

    @property
    def val_masking(self) -> bool:
        """Whether a document of the validation split is read without those before it in a
        sequence."""
        if self.source is not None and SOURCES.get(self.source).is_read_alone:
            return True
        return self.document_masking

    def text_sources(self) -> list[TextSource]:
        """Where the text comes from: here one source."""
        return [self]

    def source_names(self) -> list[str]:
        """The names of the sources in messages and metrics."""
        return [self.source]

    def corpus_options(self, source: TextSource) -> dict[str, Any]:
        """The options of data.corpus.prepare_corpus for one of text_sources(), except seed and
        cache_dir."""
        options = source.prepared_options()
        options["val_fraction"] = self.val_fraction
        options["assistant_only_loss"] = self.assistant_only_loss
        if self.val_tokens is not None:
            options["val_tokens"] = self.val_tokens
        return options

    def describe_text(self, quote: Callable[[str], str] = str) -> str:
        """The keys that name the text, such as data.source=text data.path=a.txt."""
        texts = []
        for source in self.text_sources():
            text = f"data.source={source.source}"
            if source.path:
                text += f" data.path={quote(source.path)}"
            texts.append(text)
        described = " and ".join(texts)
        if self.val_tokens:
            described += f" data.val_tokens={quote(self.val_tokens)}"
        return described
