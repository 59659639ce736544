"""The section `data` of a config."""

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from thinker.features.cleaning.cleaning import CleaningRules
from thinker.features.streams.stream_index import HEAD_BYTES
from thinker.model.config import MAX_SIZE
from thinker.training.config.source_section import CleanConfig, MixedSource, TextSource
from thinker.training.config.types import PathText

DEFAULT_SEQ_LEN = 256


class DataConfig(TextSource):
    """The corpus, the tokenizer, and how tokens are packed into sequences. source is tales if it is omitted."""

    sources: list[MixedSource] | None = None
    """Several sources with weights, instead of source and its options (docs/guides/mixtures.md)."""
    tokenizer: PathText | None = None
    """Tokenizer name, such as char or bpe:4096, or path. null: the tokenizer of run.init_from, or else bpe:4096."""
    seq_len: Annotated[int, Field(ge=2, le=MAX_SIZE)] = DEFAULT_SEQ_LEN
    """Tokens per sequence. If omitted, capped at model.max_seq_len or the context length of run.init_from."""
    packing: Literal["contiguous", "documents", "best_fit"] = "contiguous"
    """contiguous: cut the text anywhere. documents: whole documents in order. best_fit: in any order, less padding."""
    shift_windows: bool = False
    """With contiguous packing, cut the stream at other positions in each epoch after the first."""
    assistant_only_loss: bool = False
    """Compute the loss only on the assistant's messages in conversations."""
    chat_template: PathText | None = None
    """Jinja file with the chat template. null: the template of the tokenizer."""
    document_masking: bool = False
    """Let tokens attend only within their own document, and restart positions at each document."""
    val_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.05
    """Fraction of documents held out for validation. Has no effect with val_tokens."""
    val_tokens: PathText | None = None
    """File of GPT-2 tokens for the validation split (docs/guides/gpu.md). Its documents are excluded from training."""
    num_workers: Annotated[int, Field(ge=0, le=64)] = 1
    """Number of threads that prepare batches ahead of time. 0: prepare each batch when it is needed."""
    clean: CleanConfig | None = None
    """Rules for dropping documents, such as `{min_characters: 50, duplicates: near}` (docs/guides/cleaning.md)."""
    cache_dir: PathText = ".cache"
    """Folder of the token cache."""

    @property
    def val_packing(self) -> str:
        """The packing of the validation split: whole documents for tales, whose entropy is known."""
        return "documents" if self.source == "tales" else self.packing

    def text_sources(self) -> list[TextSource]:
        """The sources of a mixture, or this one."""
        return self.sources or [self]

    def corpus_options(self, source: TextSource) -> dict[str, Any]:
        """The options of data.corpus.prepare_corpus for one of text_sources(), except seed and cache_dir.

        Of a stream, they prepare the first HEAD_BYTES, which have its validation split.
        """
        options = source.source_options()
        if source.buffer_tokens is not None:
            options["first_bytes"] = HEAD_BYTES
        for key in ("val_fraction", "assistant_only_loss"):
            options[key] = getattr(self if getattr(source, key) is None else source, key)
        options["clean"] = None if self.clean is None else CleaningRules(**self.clean.model_dump())
        return options if self.val_tokens is None else options | {"val_tokens": self.val_tokens}

    def describe_text(self, quote: Callable[[str], str] = str) -> str:
        """The keys that name the text, such as data.source=text data.path=a.txt."""
        texts = [f"data.source={each.source}" + (f" data.path={quote(each.path)}" if each.path else "")
                 for each in self.text_sources()]  # fmt: skip
        return " and ".join(texts) + (
            f" data.val_tokens={quote(self.val_tokens)}" if self.val_tokens else ""
        )

    @model_validator(mode="after")
    def _check_streams(self) -> "DataConfig":
        if any(source.buffer_tokens for source in self.text_sources()):
            if self.clean is not None:
                raise ValueError(
                    "clean cannot be combined with buffer_tokens, as it reads the whole source first"
                )
            if self.shift_windows and self.sources is None:
                raise ValueError("shift_windows has no effect with buffer_tokens; remove it")
        return self

    @model_validator(mode="after")
    def _check_sources(self) -> "DataConfig":
        labels = [source.label for source in self.sources or ()]
        if self.sources is None:
            return self
        if not labels:
            raise ValueError("sources is empty; add a source, or remove the key")
        own = ("buffer_tokens",) if self.buffer_tokens else ()
        if key := next(
            iter((*self.source_options(), *own)), "val_tokens" if self.val_tokens else None
        ):
            remedy = (
                "remove it" if key == "val_tokens" else "remove it, or set it in one of the sources"
            )
            raise ValueError(f"{key} cannot be combined with data.sources; {remedy}")
        if label := next((label for label in labels if labels.count(label) > 1), None):
            raise ValueError(
                f"sources has two sources called {label}; give one of them another name"
            )
        return self
