"""The log-probabilities of a prompt's tokens, computed while the prompt is read."""

from __future__ import annotations

from torch import Tensor

from thinker.generation.ranking import top_tokens


class PromptScores:
    """The log-probability of each token of a prompt, given all tokens before it.

    Attributes:
        logprobs: of the tokens that have been scored, in nats; None for the first one, and for
            those that a bidirectional prefix shows to the model before it predicts them.
        top_logprobs: the likeliest tokens at the same positions, by id, in descending order.
    """

    def __init__(self, tokens: list[int], n_top: int, n_ids: int, n_visible: int) -> None:
        """`n_ids`: of the tokenizer; `n_visible`: tokens in the bidirectional prefix."""
        self._tokens = list(tokens)
        self._n_top = min(n_top, n_ids)
        self._n_ids = n_ids
        self._n_visible = n_visible
        self.logprobs: list[float | None] = [None]
        self.top_logprobs: list[dict[int, float]] = [{}]

    @property
    def is_complete(self) -> bool:
        """Whether all tokens have been scored."""
        return len(self.logprobs) == len(self._tokens)

    def add(self, logits: Tensor) -> None:
        """Score the next tokens from the logits before each, (T, V); one more may follow them."""
        start = len(self.logprobs)
        targets = self._tokens[start : start + len(logits)]
        logits = logits[: len(targets), : self._n_ids].float()  # ids above are padding
        logprobs = logits.log_softmax(dim=-1).cpu()
        tops: list[dict[int, float]] = [{}] * len(targets)
        if self._n_top:
            values, ids = top_tokens(logprobs, self._n_top)
            tops = [dict(zip(*pair)) for pair in zip(ids.tolist(), values.tolist())]
        for index, token in enumerate(targets):
            if start + index < self._n_visible:
                self.logprobs.append(None)
                self.top_logprobs.append({})
            else:
                self.logprobs.append(float(logprobs[index, token]))
                self.top_logprobs.append(tops[index])
