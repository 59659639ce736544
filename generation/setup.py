"""What a Generator is built for: the model, and the options that several parts read."""

from dataclasses import dataclass

import torch

from thinker.data.tokenizers.tokenizer import Tokenizer
from thinker.generation.mixed_bits import Bits
from thinker.model import Thinker, ThinkerConfig
from thinker.runtime.errors import UserError


@dataclass(frozen=True)
class Setup:
    """The options of a Generator. Each part checks its own options against it when it is built."""

    model: Thinker  # as it was trained
    tokenizer: Tokenizer
    use_cache: bool
    dtype: torch.dtype  # of weights, activations and cache
    bits: Bits  # of the weights
    compile: bool | None
    window: int | None
    sinks: int
    cache_bits: int | None

    @property
    def config(self) -> ThinkerConfig:
        """The config of the model."""
        return self.model.config

    @property
    def is_on_cpu(self) -> bool:
        """Whether the model is on a CPU."""
        return self.model.device.type == "cpu"

    def prepare(self, model: Thinker, native: bool = False) -> tuple[Thinker, bool, str]:
        """A copy of a model for inference, whether the native decoder may run it, and a problem.

        `native`: with kernels in C, as far as they compute what the model does.
        """
        from thinker.generation.decoders.choose_model import choose_inference_model

        return choose_inference_model(model, self.dtype, self.bits, native)

    def fuse(self, model: Thinker, native: bool = False) -> Thinker:
        """As prepare(); the copy alone."""
        return self.prepare(model, native)[0]

    def need_cache(self, option: str) -> None:
        """Raise UserError if an option that needs the KV cache has none."""
        if not self.use_cache:
            raise UserError(f"{option} needs the KV cache; use use_cache=True")

    def need_plain_attention(self, option: str) -> None:
        """Raise UserError if an option does not support the attention of the model."""
        config = self.config
        if not config.is_plain:
            needs = "full attention and plain RoPE in all layers, no soft cap or sinks"
            has = f"model.attention={config.attention}, model.positions={config.positions}"
            raise UserError(f"{option} needs {needs} (this model has {has})")
