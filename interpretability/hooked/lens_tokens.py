"""Texts to tokens and back with TransformerLens's functions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from thinker.data.tokenizers.tokenizer import Tokenizer
from thinker.interpretability.hooked.hooked_config import HookedConfig
from thinker.runtime.errors import UserError

Texts = str | list[str]
Ids = Sequence[int] | Tensor


class LensTokens:
    """The functions of HookedThinker for tokens. BOS is prepended by default if
    cfg.default_prepend_bos. As in TransformerLens, names of special tokens in a text become these
    tokens."""

    cfg: HookedConfig
    W_U: Tensor
    _tokenizer: Tokenizer | None

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises UserError if there is none."""
        if self._tokenizer is None:
            raise UserError("this model has no tokenizer; pass one, or pass tokens instead of text")
        return self._tokenizer

    @property
    def pad_id(self) -> int:
        """What fills the ends of shorter texts."""
        names = self.tokenizer.special_tokens_map or {}
        return self.tokenizer.special_tokens.get(names.get("pad_token"), self.tokenizer.eos_id)

    def _encode(self, text: str, prepend_bos: bool | None, truncate: bool) -> list[int]:
        if prepend_bos is None:
            prepend_bos = self.cfg.default_prepend_bos
        ids = self.tokenizer.encode(text, allow_special=True)
        if prepend_bos:
            ids = [self.tokenizer.bos_id, *ids]
        if truncate:
            ids = ids[: self.cfg.n_ctx]
        return ids

    def to_tokens(
        self,
        input: Texts,
        prepend_bos: bool | None = None,
        move_to_device: bool = True,
        truncate: bool = True,
    ) -> Tensor:
        """Texts to tokens (B, T). Shorter texts are padded on the right. truncate: to n_ctx
        tokens."""
        texts = [input] if isinstance(input, str) else input
        rows = [self._encode(text, prepend_bos, truncate) for text in texts]
        length = max(map(len, rows))
        for row in rows:
            row += [self.pad_id] * (length - len(row))
        tokens = torch.tensor(rows, dtype=torch.int64)
        if move_to_device:
            tokens = tokens.to(self.cfg.device)
        return tokens

    def _text(self, ids: list[int]) -> str:
        """The text of tokens, with special tokens as their names."""
        names = {number: name for name, number in self.tokenizer.special_tokens.items()}
        text = ""
        part = []
        for number in ids:
            if number in names:
                text += self.tokenizer.decode(part) + names[number]
                part = []
            else:
                part.append(number)
        return text + self.tokenizer.decode(part)

    def to_string(self, tokens: Ids | list[list[int]]) -> str | list[str]:
        """Tokens to a text, or (B, T) to a list of texts. Special tokens become their names."""
        tokens = torch.as_tensor(tokens)
        if tokens.dim() == 2:
            return [self._text(row) for row in tokens.tolist()]
        return self._text(tokens.reshape(-1).tolist())

    def to_str_tokens(
        self, input: str | list | Tensor, prepend_bos: bool | None = None
    ) -> list[str] | list[list[str]]:
        """The text of each token of a text or of tokens (T,) or (1, T). A list gives a list of
        lists."""
        if isinstance(input, list):
            return [self.to_str_tokens(each, prepend_bos) for each in input]
        if isinstance(input, str):
            ids = self._encode(input, prepend_bos, truncate=True)
        else:
            tokens = torch.as_tensor(input)
            if tokens.dim() == 2 and len(tokens) == 1:
                tokens = tokens[0]
            if tokens.dim() > 1:
                raise UserError(
                    f"to_str_tokens got tokens of shape {tuple(tokens.shape)}; use (T,)"
                )
            ids = tokens.reshape(-1).tolist()
        return [self._one_text(number) for number in ids]

    def _one_text(self, number: int) -> str:
        if number in self.tokenizer.special_tokens.values():
            return self._text([number])
        return self.tokenizer.token_bytes(number).decode("utf-8", errors="replace")

    def to_single_token(self, string: str) -> int:
        """The token of a text. Raises UserError unless it is exactly one."""
        ids = self._encode(string, prepend_bos=False, truncate=False)
        if len(ids) != 1:
            parts = [self._one_text(number) for number in ids]
            raise UserError(f"{string!r} is {len(ids)} tokens, not one: {parts}")
        return ids[0]

    def to_single_str_token(self, int_token: int) -> str:
        """The text of a token."""
        return self._one_text(int_token)

    def get_token_position(
        self,
        single_token: str | int,
        input: str | Tensor,
        mode: str = "first",
        prepend_bos: bool | None = None,
    ) -> int:
        """The "first" or "last" position of a token in a text or in tokens (T,) or (1, T)."""
        if mode not in ("first", "last"):
            raise UserError(f"mode is {mode!r}; use first or last")
        if isinstance(single_token, str):
            single_token = self.to_single_token(single_token)
        tokens = input
        if isinstance(input, str):
            tokens = self.to_tokens(input, prepend_bos)
        ids = torch.as_tensor(tokens).reshape(-1).tolist()
        positions = [position for position, number in enumerate(ids) if number == single_token]
        if not positions:
            raise UserError(f"the tokens do not contain {self._one_text(single_token)!r}")
        if mode == "first":
            return positions[0]
        return positions[-1]

    def tokens_to_residual_directions(self, tokens: str | int | Tensor) -> Tensor:
        """The vectors whose products with a residual are the logits of tokens, (..., C) for tokens
        (...); (C,) for a single one."""
        if isinstance(tokens, str):
            tokens = self.to_single_token(tokens)
        tokens = torch.as_tensor(tokens, device=self.W_U.device)
        if tokens.numel() == 1:
            tokens = tokens.reshape(())
        return self.W_U.T[tokens]
