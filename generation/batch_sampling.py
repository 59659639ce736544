"""Sample the next tokens of a batch of sequences."""

from collections.abc import Callable

import torch
from torch import Tensor

from thinker.features.structured_output.constraints import allowed_tokens, banned_tokens
from thinker.generation.sampler import SamplingParams, sample
from thinker.generation.sequence import SampledToken, Sequence
from thinker.runtime.device import to_device


class BatchSampler:
    """Samples one token per row and step on the device of the logits, without synchronizing with the host.

    `contexts`: per row, its sequence and the drafts before the token. Rows with equal parameters are sampled together.
    """

    def __init__(
        self,
        contexts: list[tuple[Sequence, list[int]]],
        vocab_size: int,
        device: torch.device,
        n_steps: int = 1,
    ) -> None:
        self.device = (
            torch.device("cpu") if device.type == "mps" else device
        )  # Apple's GPUs have no float64
        uniforms = [
            [one.uniform(len(drafts) + step) for one, drafts in contexts] for step in range(n_steps)
        ]
        numbers = torch.tensor(uniforms, dtype=torch.float64, device="cpu")  # (n_steps, N)
        self._uniforms = iter(to_device(numbers, self.device))
        allowed = allowed_tokens([sequence.constraint for sequence, _ in contexts])
        self._banned = (
            None if allowed is None else banned_tokens(allowed, vocab_size, self.device)
        )  # for one step
        groups: dict[SamplingParams, list[int]] = {}
        for row, (sequence, _) in enumerate(contexts):
            groups.setdefault(sequence.sampling_key, []).append(row)
        self._groups = []
        for params, rows in groups.items():
            in_text = counts = None
            if (
                params.repetition_penalty != 1
                or params.presence_penalty
                or params.frequency_penalty
            ):
                inputs = [
                    contexts[row][0].penalty_inputs(contexts[row][1], vocab_size) for row in rows
                ]
                in_text, counts = (
                    to_device(torch.stack(tensors), self.device) for tensors in zip(*inputs)
                )
            index = slice(None) if len(groups) == 1 else to_device(rows, self.device)
            self._groups.append((params, index, in_text, counts))

    def __call__(self, logits: Tensor) -> Tensor:
        """Sample tokens (N,) from logits (N, V). The next call counts them as part of the text."""
        logits, uniforms = logits.to(self.device), next(self._uniforms)
        if self._banned is not None:
            logits = logits.masked_fill(self._banned, -torch.inf)
        if len(self._groups) == 1 and self._groups[0][2] is None:  # the usual case, without a copy
            return sample(logits, self._groups[0][0], uniforms, None, None)
        tokens = torch.empty(len(logits), dtype=torch.int64, device=self.device)
        for params, rows, in_text, counts in self._groups:
            tokens[rows] = sampled = sample(logits[rows], params, uniforms[rows], in_text, counts)
            if in_text is not None:
                in_text.scatter_(1, sampled[:, None], True)
                counts.scatter_add_(1, sampled[:, None], torch.ones_like(sampled)[:, None])
        return tokens


@torch.no_grad()
def sample_steps(
    sequences: list[Sequence], logits: Tensor, n_steps: int, step: Callable[[Tensor], Tensor]
) -> list[list[SampledToken]]:
    """Sample `n_steps` tokens per sequence from logits (B, 1, V); step(tokens (B, 1)) returns the next logits."""
    vocab_size = sequences[0].tokenizer.vocab_size
    sampler = BatchSampler(
        [(sequence, []) for sequence in sequences], vocab_size, logits.device, n_steps
    )
    n_top = min(max(sequence.params.logprobs for sequence in sequences), vocab_size)
    steps = []
    while True:
        logits = logits[:, 0, :vocab_size].float()  # (B, V); ids above the tokenizer's are padding
        tokens = sampler(logits).to(logits.device)  # (B,)
        logprobs = logits.log_softmax(dim=-1)
        top = logprobs.topk(n_top) if n_top else ()
        steps.append((tokens, logprobs.gather(1, tokens[:, None])[:, 0], *top))
        if len(steps) == n_steps:
            break
        logits = step(tokens[:, None])
    tokens, token_logprobs, *top = (
        torch.stack(column, dim=1).cpu().tolist() for column in zip(*steps)
    )
    likeliest, likeliest_ids = top or 2 * [[[()] * n_steps] * len(sequences)]
    sampled = []
    for sequence, *row in zip(sequences, tokens, token_logprobs, likeliest, likeliest_ids):
        n = sequence.params.logprobs
        sampled.append(
            [
                (token, logprob, dict(zip(ids[:n], values)))
                for token, logprob, values, ids in zip(*row)
            ]
        )
    return sampled


@torch.no_grad()
def sample_next(
    sequences: list[Sequence], drafts: list[list[int]], logits: Tensor
) -> list[list[SampledToken]]:
    """Sample one token per sequence, and one more for each accepted draft.

    Every position is sampled from the model's own distribution, with the random number of that position. A draft is
    accepted if it equals the sampled token, so speculation produces the tokens of plain decoding, greedy or sampled.
    `drafts`: per sequence, the tokens that the model read after its last token. `logits` (B, 1 + longest draft, V):
    after the last token and each draft. Returns tokens, log-probabilities and top log-probabilities per sequence.
    """
    rows = [
        (index, offset) for index, draft in enumerate(drafts) for offset in range(len(draft) + 1)
    ]  # N
    indices, offsets = map(list, zip(*rows))
    vocab_size = sequences[0].tokenizer.vocab_size  # ids above the tokenizer's are padding
    logits = logits[indices, offsets, :vocab_size].float()  # (N, V)
    tokens = sample_tokens(
        [(sequences[index], drafts[index][:offset]) for index, offset in rows], logits
    )
    logprobs = logits.log_softmax(dim=-1)  # (N, V)
    token_logprobs = logprobs.gather(1, torch.tensor(tokens, device=logits.device)[:, None])[
        :, 0
    ].tolist()
    sampled = [[] for _ in sequences]
    for row, (index, offset) in enumerate(rows):
        if [token for token, *_ in sampled[index]] == drafts[index][:offset]:
            top = top_logprobs(logprobs[row], sequences[index].params.logprobs)
            sampled[index].append((tokens[row], token_logprobs[row], top))
    return sampled


def sample_tokens(contexts: list[tuple[Sequence, list[int]]], logits: Tensor) -> list[int]:
    """Sample one token per row of logits (N, V). `contexts`: as in BatchSampler."""
    return BatchSampler(contexts, logits.shape[1], logits.device)(logits).tolist()


def top_logprobs(logprobs: Tensor, n: int) -> dict[int, float]:
    """Return the n most likely tokens of (V,) with their log-probabilities, in descending order."""
    if not n:
        return {}
    values, tokens = logprobs.topk(min(n, len(logprobs)))
    return dict(zip(tokens.tolist(), values.tolist()))
