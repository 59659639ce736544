"""Names that configs and commands may use, and the optional features that are installed.

A `Registry` maps names to what they stand for: attention patterns, MLPs, norms, sources,
optimizers, callbacks. Our own entries and those of a user's module go through the same
`register()`.

A `Feature` says what an optional feature offers to the road. The road asks here for whatever a
config or a command selects; it never names a feature.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Generic, TypeVar

from thinker.runtime.errors import UserError, did_you_mean

T = TypeVar("T")

FEATURES = "thinker.features"  # the package whose FEATURES lists the features, if it is there


class Registry(Generic[T]):
    """Values by name. `kind` says in messages what they are, such as "optimizer"."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._values: dict[str, T] = {}

    def register(self, name: str, value: T) -> T:
        """Add a value. Raises UserError if the name is taken by another value."""
        if self._values.get(name, value) is not value:
            raise UserError(f"there is already a {self.kind} called {name}; choose another name")
        self._values[name] = value
        return value

    def get(self, name: str) -> T:
        """The value of a name. Raises UserError that lists the names if it is unknown."""
        if name not in self._values:
            hint = did_you_mean(name, self._values) or f"; use one of {', '.join(self._values)}"
            raise UserError(f"unknown {self.kind} {name}{hint}")
        return self._values[name]

    def names(self) -> list[str]:
        """All names, in the order in which they were registered."""
        return list(self._values)

    def __contains__(self, name: str) -> bool:
        return name in self._values


@dataclass(frozen=True)
class Command:
    """A command of `thinker`, as the list of all commands shows it."""

    main: str  # "module:name" of a function () -> exit status, which parses sys.argv
    summary: str  # what the command does, in lower case and without a full stop
    group: str  # the heading under which `thinker --help` shows it


@dataclass(frozen=True)
class Feature:
    """What one optional feature offers.

    Each offer is "module:name", and is imported when it is used. A feature leaves out what it does
    not need. docs/explanations/architecture.md shows an example.
    """

    name: str
    builds_on: tuple[str, ...] = ()  # names of features that must be there, too

    # Config: the classes whose keys join a section, by the name of that section.
    keys: Mapping[str, str] = field(default_factory=dict)
    # (tree) -> None: fill in defaults that depend on other keys, before a config is validated. The
    # tree has all sections as dictionaries. A key that is set to None stays open.
    complete_config: str = ""
    check_config: str = ""  # (config) -> None: raise ValueError if keys contradict each other

    # Training.
    # (config, device, precision, previous, dist) -> config: make choices that depend on the text
    # and the machine. `previous`: settings of the resumed run or None. All ranks call it.
    resolve_config: str = ""
    # (config, ThinkerConfig, corpus, device, objective) -> objective: what a step minimizes. Return
    # `objective` if the config does not ask for another, or wrap it. Asked in the order of the list
    # of features.
    objective: str = ""
    callbacks: str = ""  # (settings) -> list of callbacks, empty if the config does not ask for any
    # Keys that decide weights or batches, such as "train.prune", and for each a function that says
    # whether it may change when a run resumes: (training.state.resume.KeyChange) -> the reason why
    # not, or "". "": it may not.
    fixed_keys: Mapping[str, str] = field(default_factory=dict)

    # Data.
    # (config, tokenizer or its name) -> Corpus: the tokens of a config, or None if the road can
    # prepare them.
    corpus: str = ""
    # (config.data, sha256, tokenizer hash) -> Corpus: the tokens of an existing run in the cache,
    # or None.
    find_corpus: str = ""
    # (training.data.training_batches.DatasetOptions) -> OrderedDataset: the training windows of all
    # sources, or None.
    dataset: str = ""
    # (DatasetOptions, TextSource, name, number) -> OrderedDataset: the windows of one source, or
    # None.
    source_dataset: str = ""
    # (settings, corpus, loader, dist) -> what measures the validation loss, as
    # evaluation.loss.Evaluator does; or None.
    evaluator: str = ""
    # (settings, corpus) -> training.callbacks.samples.SamplePrompt: what samples go on from if the
    # config has no prompt for them; or None.
    sample_prompt: str = ""
    # (settings, corpus, loader) -> lines that describe the data before a run.
    describe_data: str = ""
    # (a line of metrics.jsonl with val_loss) -> lines that describe the evaluation after a run.
    describe_evaluation: str = ""
    # (settings, corpus, loader, lines of metrics.jsonl, best val_loss) -> lines whose losses are
    # those of equal texts, to see whether the model fits them; or None if all lines are so already.
    comparable_losses: str = ""

    # Generation: the names of the options of Generator() that the feature reads. A factory is
    # called only if one of them is given. It gets them as keywords, after the parts that are built
    # already, checks them, and returns None if they are off.
    generator_options: tuple[str, ...] = ()
    cache: str = ""  # (setup, **options) -> CacheFactory | None
    decoder: str = ""  # (setup, caches, **options) -> Decoder | None
    drafter: str = ""  # (setup, caches, decoder, **options) -> Drafting | None
    observer: str = ""  # (setup, caches, decoder, **options) -> Observer | None
    constraint: str = ""  # a ConstraintSource, for SamplingParams.json_schema and .regex

    # Commands by name; flags for other commands by their name.
    commands: Mapping[str, Command] = field(default_factory=dict)
    arguments: Mapping[str, str] = field(default_factory=dict)  # (parser) -> CommandFlags | None

    # Reference. Pages of docs/reference/ by file name: (note) -> Markdown, where the note says that
    # the page is generated. For the page on the Python API: "module" or "module:Name,Name".
    pages: Mapping[str, str] = field(default_factory=dict)
    python_api: tuple[str, ...] = ()


def import_offer(offer: str) -> Any:
    """Import "module:name"."""
    module, _, name = offer.partition(":")
    return getattr(importlib.import_module(module), name)


@cache
def features() -> tuple[Feature, ...]:
    """All installed features, in the order of the list in features/__init__.py."""
    if importlib.util.find_spec(FEATURES) is None:
        return ()
    names = importlib.import_module(FEATURES).FEATURES
    found = [importlib.import_module(f"{FEATURES}.{name}").FEATURE for name in names]
    known = {feature.name for feature in found}
    for feature in found:
        missing = [name for name in feature.builds_on if name not in known]
        if missing:
            raise UserError(
                f"the feature {feature.name} builds on {missing[0]}; add it to {FEATURES}"
            )
    return tuple(found)


def offers(seam: str) -> Iterator[Callable[..., Any]]:
    """What the features offer for a seam, a field of Feature such as "objective".

    Imports the offers one by one.
    """
    for feature in features():
        offer = getattr(feature, seam)
        if offer:
            yield import_offer(offer)


def offers_by_name(seam: str, name: str) -> Iterator[Any]:
    """As offers(), for a field that maps names to offers, such as "keys" or "arguments"."""
    for feature in features():
        offer = getattr(feature, seam).get(name)
        if offer:
            yield import_offer(offer)


def only_offer(seam: str, wanted: str) -> Any:
    """What a feature offers for a seam that `wanted` needs. Raises UserError if no feature does."""
    for offer in offers(seam):
        return offer
    raise UserError(f"{wanted} needs a feature that is not installed; add it to {FEATURES}")


def feature_command(name: str) -> Callable[[], int]:
    """The main function of a feature's command. Raises UserError if the feature is missing."""
    for feature in features():
        if name in feature.commands:
            return import_offer(feature.commands[name].main)
    raise UserError(
        f"the command {name} belongs to a feature that is not installed; add it to {FEATURES}"
    )
