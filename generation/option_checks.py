"""Checks of a Generator's options."""

from typing import Any

from thinker.features.early_exit.decoder import check_early_exit
from thinker.features.retrieval.retrieval_cache import DEFAULT_BLOCK, context_size
from thinker.generation.caches.quantized_cache import check_cache_bits
from thinker.generation.mixed_bits import Bits, check_bits
from thinker.model import Thinker
from thinker.runtime.errors import UserError


def check_options(
    generator: Any, compile: bool, bits: Bits, draft: Thinker | None, on_cpu: bool
) -> None:
    """Raise UserError if options contradict each other or do not suit the model. Arguments as in Generator()."""
    config, tokenizer = generator.config, generator.tokenizer
    window, sinks, speculate = generator.window, generator.sinks, generator.speculate
    if tokenizer.vocab_size > config.vocab_size:
        raise UserError(
            f"tokenizer has {tokenizer.vocab_size} ids, more than the model's {config.vocab_size}"
        )
    if sinks < 0 or (window is None and sinks):
        raise UserError(f"sinks is {sinks}; use at least 0, and only with a window")
    if window is not None and not 1 <= window <= config.max_seq_len - sinks:
        limit = f"the trained context ({config.max_seq_len} tokens)"
        raise UserError(
            f"window is {window}, sinks is {sinks}; use window >= 1, and a sum of at most {limit}"
        )
    retrieve, block = generator.retrieve, generator.retrieve_block
    if retrieve < 0 or (window is None and retrieve):
        raise UserError(f"retrieve is {retrieve}; use at least 0, and only with a window")
    if retrieve and (block < 1 or window % block):
        raise UserError(
            f"retrieve_block is {block} and window is {window}; use a block that divides the window"
        )
    if not retrieve and block != DEFAULT_BLOCK:
        raise UserError(
            f"retrieve_block is {block}, but retrieve is 0; set retrieve to the number of blocks per query"
        )
    if retrieve and context_size(window, sinks, retrieve, block) > config.max_seq_len:
        size = f"a query would attend to up to {context_size(window, sinks, retrieve, block)} positions"
        trained = f"the trained context has {config.max_seq_len}"
        raise UserError(
            f"{size} (sinks + retrieve * retrieve_block + window + retrieve_block - 1), but {trained}"
        )
    if retrieve and generator.monitor is not None:
        raise UserError(
            "monitor cannot be combined with retrieve, whose attention it does not see; use only one"
        )
    check_bits(bits, config.n_layers)
    if not 0 <= speculate <= 64:
        raise UserError(f"speculate is {speculate}; use 0 (off) to 64 drafted tokens per step")
    options = {"window": window, "speculate": speculate, "compile": compile}
    if generator.early_exit is not None:
        check_early_exit(config, generator.early_exit)
        if used := [name for name, value in options.items() if value]:
            raise UserError(f"early_exit cannot be combined with {used[0]}; use only one")
    for name, value in (
        options | {"early_exit": generator.early_exit, "monitor": generator.monitor}
    ).items():
        if value and not generator.use_cache:
            raise UserError(f"{name} needs the KV cache; use use_cache=True")
    compile = compile and not on_cpu  # kernels for a CPU support all models and windows
    if window is not None and (speculate or compile):
        raise UserError(
            f"window cannot be combined with {'speculate' if speculate else 'compile'}; use only one"
        )
    if (window is not None or compile) and not config.is_plain:
        name, has = (
            "compile" if compile else "window",
            f"{config.attention}, model.positions={config.positions}",
        )
        needs = "full attention and plain RoPE in all layers, no soft cap or sinks"
        raise UserError(f"{name} needs {needs} (this model has model.attention={has})")
    check_cache_bits(generator, compile)
    patterns = config.patterns if draft is None else (*config.patterns, *draft.config.patterns)
    if speculate and any(pattern.n_features for pattern in patterns):
        raise UserError(
            "speculate does not support linear attention: its state cannot be rolled back; use 0"
        )
    if draft is None:
        return
    if isinstance(bits, dict):
        raise UserError(
            "bits of each matrix cannot be combined with a draft, which has other matrices; use 8 or 4"
        )
    n_ids, n_draft_ids, length = (
        config.vocab_size,
        draft.config.vocab_size,
        draft.config.max_cached_len,
    )
    if not speculate:
        raise UserError("draft needs speculate; set it to the number of tokens to draft per step")
    if n_draft_ids != n_ids:
        raise UserError(
            f"the draft has {n_draft_ids} token ids, the model has {n_ids}; use the same tokenizer"
        )
    if draft.config.prefix > config.prefix:
        raise UserError(
            f"the draft's bidirectional prefix is {draft.config.prefix}; use at most {config.prefix}"
        )
    if not draft.config.is_unbounded and (config.is_unbounded or length < config.max_cached_len):
        needed = (
            "an unbounded context" if config.is_unbounded else f"at least {config.max_cached_len}"
        )
        raise UserError(
            f"the draft model's context is {length} tokens; use a draft model with {needed}"
        )
