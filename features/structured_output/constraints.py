"""Constrained decoding: which tokens keep a text valid under a JSON schema or a regular expression.

The grammars are compiled by the library llguidance. A token is allowed if its bytes can continue a
valid text, however the tokenizer would split that text. The end of text is allowed where the text
is complete.
"""

import json
import re
from collections.abc import Callable
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from thinker.data.tokenizers.tokenizer import Tokenizer
from thinker.features.structured_output.compile_limit import check_compile_time
from thinker.generation.constraint import pack_tokens
from thinker.runtime.errors import UserError, install_command

N_GRAMMARS = 32  # kept per tokenizer
DEAD_END = "NoExtensionBias"  # how llguidance's error begins if no token fits
SHARED_LIMIT = "lexer error"  # and if a limit is reached to which other texts may have contributed
# Wherever JSON allows whitespace: a space, or a line break and indentation. A model could fill a
# text with more.
WHITESPACE = r" |\n[ \t]{0,20}"

_compilers: WeakKeyDictionary[Tokenizer, "_Compiler"] = WeakKeyDictionary()


class _Grammar:
    """A compiled JSON schema or regular expression.

    The texts that it gives matchers to share what llguidance finds out about the grammar. That
    makes them faster, but its size has a limit, which a few texts of a difficult grammar reach.
    """

    def __init__(self, vocabulary: Any, kind: str, source: str) -> None:
        """Raises UserError if the source is not supported."""
        self._compile = partial(_compile, vocabulary, kind, source)
        self._shared: Any = self._compile()

    def new_matcher(self) -> Any:
        """A matcher at the beginning of a text, for one of the texts that share."""
        shared = self._shared
        if shared is None:
            shared = self._compile()
            self._shared = shared
        return shared.deep_copy()

    def new_matcher_alone(self) -> Any:
        """A matcher that shares nothing, after a limit was reached. Later texts begin anew, too."""
        self._shared = None
        return self._compile()


class _Compiler:
    """Compiles grammars for a tokenizer.

    Each byte is a token for llguidance. Those that are none of the tokenizer's have ids behind its
    vocabulary, beyond the words of the mask that are used.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Raises UserError if llguidance is missing, or the tokenizer has no EOS without text."""
        tokens = _token_bytes(tokenizer)
        self.token_of_byte = [0] * 256
        found = {data[0]: token for token, data in enumerate(tokens) if len(data) == 1}
        tokens += [b""] * (-len(tokens) % 32)
        for byte in range(256):
            if byte not in found:
                found[byte] = len(tokens)
                tokens.append(bytes([byte]))
            self.token_of_byte[byte] = found[byte]
        self.n_ids = len(tokens)
        vocabulary = _vocabulary(tokenizer, tokens)
        self.grammar: Callable[[str, str], _Grammar]
        self.grammar = lru_cache(N_GRAMMARS)(partial(_Grammar, vocabulary))


class GrammarConstraint:
    """What may follow in one text, as a set of allowed tokens (see Constraint)."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        json_schema: str | None,
        regex: str | None,
        logit_bias: tuple[tuple[int, float], ...] = (),
    ) -> None:
        """One of `json_schema` and `regex`, and `logit_bias`: as in SamplingParams.

        Raises UserError if it is invalid or not supported, or if no text can match it.
        """
        kind, source = "json_schema", json_schema
        if json_schema is None:
            kind, source = "regex", regex
        if tokenizer not in _compilers:
            _compilers[tokenizer] = _Compiler(tokenizer)
        compiler = _compilers[tokenizer]
        self._kind = kind
        self._grammar = compiler.grammar(kind, source)
        self._token_of_byte = compiler.token_of_byte
        self._matcher = self._grammar.new_matcher()
        self._is_alone = False  # whether the matcher shares nothing with other texts
        self._tokens: list[int] = []
        mask = np.zeros(-(-compiler.n_ids // 32), dtype=np.int32)
        self._address = mask.ctypes.data
        self._n_bytes = mask.nbytes
        self._allowed = mask[: -(-tokenizer.vocab_size // 32)]  # shares its memory
        self.allowed = torch.from_numpy(self._allowed)
        self._permitted: np.ndarray | None = None
        banned = [token for token, bias in logit_bias if bias == -np.inf]
        if banned:
            self._permitted = ~pack_tokens(banned, tokenizer.vocab_size)
        self._update()
        if not self.can_continue:
            problem = "cannot be used: no token can begin a text that matches it"
            raise UserError(f"{kind} {problem}; change it or the logit bias")

    @property
    def is_complete(self) -> bool:
        """Whether the text so far matches as a whole."""
        return self._matcher.is_accepting()

    def append(self, token: int) -> None:
        """Add an allowed token, other than the end of text, to the text.

        Raises UserError if the text reaches a limit of llguidance.
        """
        self._tokens.append(token)
        self._matcher.consume_token(token)
        self._update()

    def append_bytes(self, data: bytes) -> bool:
        """Add bytes to the text; see Constraint."""
        tokens = [self._token_of_byte[byte] for byte in data]
        self._tokens += tokens
        if self._matcher.try_consume_tokens(tokens) < len(tokens):
            return False
        self._update()
        return True

    def _update(self) -> None:
        self._compute_allowed()
        is_shared = not self._is_alone and self._matcher.get_error().startswith(SHARED_LIMIT)
        if self._is_at_limit and is_shared:
            # Perhaps because of the texts that shared the grammar: what it is alone counts.
            self._begin_alone()
        if self._is_at_limit:
            reason = _reason(self._matcher.get_error())
            problem = f"is too complex for a text of {len(self._tokens)} tokens"
            raise UserError(f"{self._kind} {problem} ({reason}); simplify it")
        self.can_continue = not (self._matcher.is_stopped() or self._matcher.is_error())
        if self.can_continue and self._permitted is not None:
            self._allowed &= self._permitted
            self.can_continue = bool(self._allowed.any())

    def _compute_allowed(self) -> None:
        if not self._matcher.is_stopped():
            self._matcher.unsafe_compute_mask_ptr(self._address, self._n_bytes)

    @property
    def _is_at_limit(self) -> bool:
        """Whether llguidance gave up; where no token fits is only a dead end of this text."""
        return self._matcher.is_error() and not self._matcher.get_error().startswith(DEAD_END)

    def _begin_alone(self) -> None:
        """Follow the text again with a matcher of its own, as if there were no other text."""
        self._is_alone = True
        self._matcher = self._grammar.new_matcher_alone()
        self._compute_allowed()
        for token in self._tokens:
            self._matcher.consume_token(token)
            self._compute_allowed()


def _token_bytes(tokenizer: Tokenizer) -> list[bytes]:
    """The bytes of each token as llguidance sees them.

    Special tokens and gaps have no bytes, so of them only EOS is ever allowed.
    """
    tokens = [tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)]
    for token in tokenizer.eos_ids:
        tokens[token] = b""
    return tokens


def _vocabulary(tokenizer: Tokenizer, tokens: list[bytes]) -> Any:
    """llguidance's view of a tokenizer. Raises UserError."""
    try:
        import llguidance
    except ModuleNotFoundError:
        remedy = f"install it: {install_command('serve')}"
        raise UserError(f"json_schema and regex need llguidance; {remedy}") from None
    eos_ids = [token for token in tokenizer.eos_ids if not tokenizer.token_bytes(token)]
    if not eos_ids:
        needed = "json_schema and regex need one without text"
        raise UserError(f"the tokenizer's EOS token is ordinary text; {needed}")
    view = SimpleNamespace(
        tokens=tokens, special_token_ids=[], eos_token_id=eos_ids[0], bos_token_id=None
    )
    wrapper = llguidance.TokenizerWrapper(view)  # cannot encode: see no_forcing
    return llguidance.LLTokenizer(wrapper, eos_token=eos_ids)


def _compile(vocabulary: Any, kind: str, source: str) -> Any:
    """A matcher at the beginning of a text. Raises UserError if the source is not supported."""
    from llguidance import LLMatcher, regex_to_lark

    if kind == "regex":
        body = f"/{regex_to_lark(source, '')}/"
    else:
        options = {"x-guidance": {"whitespace_pattern": WHITESPACE}}
        body = "%json " + json.dumps(options | json.loads(source))
    # Without no_forcing, llguidance asks the tokenizer to encode what must come next, and allows
    # only that.
    grammar = f'%llguidance {{"no_forcing": true}}\nstart: {body}'
    check_compile_time(kind, grammar)
    matcher = LLMatcher(vocabulary, grammar, log_level=0)
    problems = matcher.get_grammar_warnings()
    if matcher.is_error():
        problems = [matcher.get_error()]
    if problems:
        raise UserError(f"{kind} cannot be used: {_reason(problems[0])}")
    return matcher


def _reason(message: str) -> str:
    """The one line of llguidance's message that says what is wrong."""
    of_regex = re.search(r"^error: (.+)$", message, re.MULTILINE)
    if of_regex:
        return of_regex[1]
    line = message.strip().splitlines()[0]
    line = line.partition(". Enable 'coerce_one_of'")[0]  # an option that is not ours
    return re.sub(r"^at \d+\(\d+\): |failed to compile JSON schema: ", "", line)[:300]
