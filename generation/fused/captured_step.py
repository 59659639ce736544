"""A decoding step with fused kernels: its CUDA graphs, its proof, and its reads and samples."""

from __future__ import annotations

import torch
from torch import Tensor

from thinker.generation import sampler
from thinker.generation.decoders import cuda_graph
from thinker.generation.fused.batch_step import BatchStep
from thinker.generation.fused.fused_step import FusedStep
from thinker.generation.sampling_params import SamplingParams
from thinker.generation.sequence import SampledToken, Sequence
from thinker.model import KVCache, Thinker, proof
from thinker.runtime.device import to_device

PROVED_LENGTHS = (200, 0, 77)  # tokens before those whose logits are compared, at most
PROVED_UNIFORMS = (0.05, 0.3, 0.55, 0.8)
LOGPROB_TOLERANCE = 1e-3
# Probability between a token and the sampler's. Where thousands are about equally likely, rounding
# in fp32 may choose the next one.
SAMPLE_TOLERANCE = 1e-3
OVERLAP_CAPABILITY = (9, 0)  # of cards with programmatic dependent launch


class CapturedStep:
    """A step of up to `n_texts` texts on the tensors of a cache; on a GPU, also CUDA graphs."""

    def __init__(self, model: Thinker, cache: KVCache, n_texts: int) -> None:
        self.model = model
        self.cache = cache
        self.n_texts = n_texts
        is_cuda = model.device.type == "cuda"
        if n_texts == 1:
            overlap = is_cuda and _may_overlap(model.device)
            self.fused: FusedStep | BatchStep = FusedStep(model, cache, n_texts, overlap)
        else:
            self.fused = BatchStep(model, cache, n_texts)
        self._read = self.fused.step
        self._read_and_sample = self._step_and_sample
        if is_cuda:
            self._capture()

    def _step_and_sample(self) -> None:
        self.fused.step()
        self.fused.sample()

    def _capture(self) -> None:
        """Compile the kernels, and capture both graphs. No text is read meanwhile."""
        self.fused.positions.fill_(-1)
        runs = (self.fused.step, self._step_and_sample)
        replays = cuda_graph.capture(self.model.device, self._warm_up, *runs)
        self._read, self._read_and_sample = replays

    def _warm_up(self) -> None:
        """Launch every kernel."""
        self._step_and_sample()
        self.fused.summarize()

    def run(self, tokens: Tensor, rows: list[int], positions: list[int]) -> Tensor:
        """Read a token (B, 1) of each row at its position. Returns the logits after them,
        (B, 1, V)."""
        B = len(rows)
        self.fused.tokens[:B].copy_(tokens[:, 0])
        self._place(rows, positions)
        self._read()
        return self.fused.logits[:B].clone()[:, None]

    def _place(self, rows: list[int], positions: list[int]) -> None:
        """Set the rows and the positions of the texts."""
        n_padding = self.n_texts - len(rows)
        places = [positions + [-1] * n_padding, rows + [0] * n_padding]
        self.fused.places.copy_(to_device(places, self.fused.places.device))

    def sample(
        self,
        sequences: list[Sequence],
        logits: Tensor,
        rows: list[int],
        positions: list[int],
        n_steps: int,
    ) -> list[list[SampledToken]]:
        """Sample `n_steps` tokens per sequence from logits (B, 1, V), the first for its position.

        All of them but the last are read.
        """
        fused = self.fused
        B = len(sequences)
        uniforms: list[list[float]] = []
        for sequence in sequences:
            uniforms.append([sequence.uniform(step) for step in range(n_steps)])
        numbers = torch.tensor(uniforms, dtype=torch.float64, device="cpu")
        temperatures = [one.params.temperature for one in sequences]
        fused.uniforms[:B, :n_steps] = to_device(numbers, fused.uniforms.device)
        fused.temperatures[:B] = to_device(temperatures, fused.uniforms.device)
        fused.n_ids.fill_(sequences[0].tokenizer.vocab_size)
        fused.n_sampled.zero_()
        fused.logits[:B].copy_(logits[:, 0])
        self._place(rows, [position - 1 for position in positions])
        fused.summarize()
        fused.sample()
        for _ in range(n_steps - 1):
            self._read_and_sample()
        tokens = fused.sampled[:B, :n_steps].cpu().tolist()
        logprobs = fused.logprobs[:B, :n_steps].cpu().tolist()
        sampled = []
        for row in range(B):
            sampled.append([(*pair, {}) for pair in zip(tokens[row], logprobs[row])])
        return sampled

    def agrees_with_model(self) -> bool:
        """Whether the kernels have the logits of the model after texts with random keys, and
        sample from them as the sampler does.

        The texts lie in rows of the cache, which has its own keys again afterwards.
        """
        rows, positions = self._proved_places()
        end = max(positions) + 1
        layers = [(layer.keys, layer.values) for layer in self.cache.layers]
        kept = []
        for keys, values in layers:
            kept.append((keys[rows, :, :end].clone(), values[rows, :, :end].clone()))
        try:
            found, known = self._logits_of_both(rows, positions)
        finally:
            for (keys, values), (old_keys, old_values) in zip(layers, kept):
                keys[rows, :, :end] = old_keys
                values[rows, :, :end] = old_values
        if not proof.has_near_logits(self.model, found, known):
            return False
        return self._samples_alike(found[0])

    def _proved_places(self) -> tuple[list[int], list[int]]:
        """Rows of the cache, the last first, and a position in each."""
        n_rows = len(self.cache.layers[0].keys)
        last = min(self.fused.capacity, self.model.config.max_seq_len) - 1
        n_proved = min(self.n_texts, n_rows, len(PROVED_LENGTHS))
        rows = [n_rows - 1 - index for index in range(n_proved)]
        return rows, [min(length, last) for length in PROVED_LENGTHS[:n_proved]]

    def _logits_of_both(self, rows: list[int], positions: list[int]) -> tuple[Tensor, Tensor]:
        """The logits of the kernels and of the model after a token in each row, (B, 1, V)."""
        noise = proof.Noise()
        end = max(positions) + 1
        own = self.model.new_cache(len(rows), end)
        for layer, stored in zip(own.layers, self.cache.layers):
            for mine, theirs in ((layer.keys, stored.keys), (layer.values, stored.values)):
                mine.copy_(noise(mine.shape))
                theirs[rows, :, :end] = mine
        own.lengths = list(positions)
        own.high_water = own.high_water_before = list(positions)
        V = self.model.config.vocab_size
        tokens = torch.arange(V // 2, V // 2 + len(rows), device=self.model.device)[:, None] % V
        known = self.model(tokens, cache=own)
        return self.run(tokens, rows, positions), known

    def _samples_alike(self, logits: Tensor) -> bool:
        """Whether the kernels draw from logits (1, V) what the sampler draws."""
        fused = self.fused
        n = len(PROVED_UNIFORMS)
        uniforms = torch.tensor(PROVED_UNIFORMS, dtype=torch.float64, device=logits.device)
        fused.uniforms[:, :n] = uniforms
        fused.logits.copy_(logits)
        for temperature in (0.0, 1.0):
            fused.temperatures.fill_(temperature)
            fused.n_sampled.zero_()
            fused.summarize()
            for _ in range(n):
                fused.sample()
            params = SamplingParams(1, temperature=temperature)
            rows = fused.logits[:1].float().expand(n, -1)
            known = sampler.sample(rows, params, uniforms, None, None)[:, None]
            logprobs = rows.log_softmax(dim=-1)
            cumulative = logprobs.double().exp().cumsum(dim=-1)
            for text in (0, self.n_texts - 1):
                found = fused.sampled[text, :n].long()[:, None]
                if temperature == 0 and not torch.equal(found, known):
                    return False
                between = (cumulative.gather(1, found) - cumulative.gather(1, known)).abs()
                if between.max() > SAMPLE_TOLERANCE:
                    return False
                known_logprobs = logprobs.gather(1, found)[:, 0]
                if not proof.is_near(fused.logprobs[text, :n], known_logprobs, LOGPROB_TOLERANCE):
                    return False
        return True


def _may_overlap(device: torch.device) -> bool:
    """Whether a kernel may start before the previous one ends."""
    return torch.cuda.get_device_capability(device) >= OVERLAP_CAPABILITY
