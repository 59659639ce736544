"""Builds the parts of a Generator: its caches, its decoder, and what features add."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from thinker.generation.caches.cache_factory import CacheFactory
from thinker.generation.caches.full_cache import FullCaches
from thinker.generation.decoders.decoder import Decoder
from thinker.generation.sequence import Sequence
from thinker.generation.setup import Setup
from thinker.model import KVCache, Thinker
from thinker.runtime.errors import UserError, did_you_mean
from thinker.runtime.registry import features, import_offer

if TYPE_CHECKING:
    from thinker.generation.drafting import Drafting

Options = Mapping[str, Any]  # those of features, by name


class Observer(Protocol):
    """Watches texts grow, without changing them."""

    def observe(
        self, model: Thinker, sequences: list[Sequence], copy_row: Callable[[int], KVCache]
    ) -> None:
        """Called after each step, when the newest token of each sequence has not been read.

        copy_row(index): a copy of the cache of a sequence, of which this call may change all.
        Texts that have ended are not shown, so there may be no sequences.
        """

    def max_tokens(self) -> int:
        """Tokens per text that a step may sample before observe() is called."""


def check_names(options: Options, own: list[str]) -> None:
    """Raise UserError for an option that no feature has. `own`: the names of the Generator's."""
    known: list[str] = []
    for feature in features():
        known += feature.generator_options
    for name in options:
        if name not in known:
            hint = did_you_mean(name, own + known)
            raise UserError(f"Generator has no option {name}{hint or '; remove it'}")


def build_caches(setup: Setup, options: Options) -> CacheFactory:
    """What makes the caches. Raises UserError if options contradict each other."""
    if setup.window is None and setup.sinks:
        raise UserError(f"sinks is {setup.sinks}; use at least 0, and only with a window")
    of_feature = _the_part("cache", options, setup)
    if of_feature is not None:
        return of_feature
    # Imported where they are used, because most texts need neither.
    if setup.window is not None:
        from thinker.generation.caches.sink_cache import WindowCaches

        return WindowCaches(setup, setup.window, setup.sinks)
    if setup.cache_bits is not None:
        from thinker.generation.caches.quantized_cache import QuantizedCaches

        return QuantizedCaches(setup, setup.cache_bits)
    return FullCaches()


def build_decoder(setup: Setup, caches: CacheFactory, options: Options) -> Decoder:
    """What runs the model. Raises UserError if it does not support the model or the caches."""
    of_feature = _the_part("decoder", options, setup, caches)
    if of_feature is not None:
        return of_feature
    # Imported where they are used, because a text needs only one of them.
    if setup.compile:
        setup.need_cache("compile")
    if setup.is_on_cpu and setup.compile is not False:
        return _native_decoder(setup)  # a whole step in one call; --no-compile leaves it out
    if setup.compile:
        return _compiled_decoder(setup, caches)
    model, _, problem = setup.prepare(setup.model)
    decoder = _plain_decoder(model, problem, setup.use_cache and caches.can_roll_back)
    is_plain = setup.use_cache and not caches.option
    if setup.compile is None and is_plain and _may_fuse(decoder):
        return _fused_decoder(decoder)
    return decoder


def _compiled_decoder(setup: Setup, caches: CacheFactory) -> Decoder:
    """The decoder of a GPU that compiles what the fused kernels do not know."""
    from thinker.generation.decoders.compiled_decoder import CompiledDecoder

    CompiledDecoder.check(setup, caches)
    decoder = CompiledDecoder(setup.fuse(setup.model))
    if _has_triton(decoder.model):
        return _fused_decoder(decoder)
    return decoder


def _has_triton(model: Thinker) -> bool:
    """Whether kernels in Triton can run."""
    return model.device.type == "cuda" and importlib.util.find_spec("triton") is not None


def _may_fuse(decoder: Decoder) -> bool:
    """Whether the fused kernels know the model of a decoder."""
    if not _has_triton(decoder.model):
        return False
    from thinker.generation.fused.fused_step import unsupported

    return not unsupported(decoder.model)


def _fused_decoder(fallback: Decoder) -> Decoder:
    """The decoder of a GPU with few launches."""
    from thinker.generation.fused.fused_decoder import FusedDecoder

    return FusedDecoder(fallback)


def _native_decoder(setup: Setup) -> Decoder:
    """The decoder with kernels in C; the plain one where they cannot run."""
    from thinker.generation.decoders.native_decoder import NativeDecoder, kernel_problem

    problem = kernel_problem(setup.dtype)
    if not problem:
        model, may_decode, problem = setup.prepare(setup.model, native=True)
        return NativeDecoder(model) if may_decode else _plain_decoder(model, problem)
    if setup.compile:
        raise UserError(f"compile is not available: {problem}; use compile=False")
    return _plain_decoder(setup.fuse(setup.model), problem)


def _plain_decoder(model: Thinker, problem: str, can_roll_back: bool = True) -> Decoder:
    from thinker.generation.decoders.plain_decoder import PlainDecoder

    return PlainDecoder(model, kernel_problem=problem, can_roll_back=can_roll_back)


def build_drafting(
    setup: Setup, caches: CacheFactory, decoder: Decoder, options: Options
) -> Drafting | None:
    """What proposes tokens, if anything does."""
    return _the_part("drafter", options, setup, caches, decoder)


def build_observers(
    setup: Setup, caches: CacheFactory, decoder: Decoder, options: Options
) -> list[Observer]:
    """What watches texts grow."""
    return list(_parts("observer", options, setup, caches, decoder))


def _the_part(seam: str, options: Options, *built: Any) -> Any:
    """The part that a feature builds, or None. Raises UserError if two features do."""
    parts = list(_parts(seam, options, *built))
    if len(parts) > 1:
        raise UserError(f"options of two features ask for a {seam} each; use only one")
    return parts[0] if parts else None


def _parts(seam: str, options: Options, *built: Any) -> Iterator[Any]:
    """The parts that features build. A feature of which no option is given is not imported."""
    for feature in features():
        own = {name: options[name] for name in feature.generator_options if name in options}
        offer = getattr(feature, seam)
        if own and offer:
            part = import_offer(offer)(*built, **own)
            if part is not None:
                yield part
