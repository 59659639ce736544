"""The implementation that Thinker is compared with: transformers, holding the same weights."""

from __future__ import annotations

from typing import Any

from thinker.interop.hf_config import to_hf_config
from thinker.interop.huggingface import to_hf_name
from thinker.model import Thinker


def to_transformers(model: Thinker) -> Any:
    """The transformers model that computes the same function, with the same weights in fp32."""
    import transformers

    settings = to_hf_config(model.config, None)
    config = transformers.AutoConfig.for_model(settings.pop("model_type"), **settings)
    reference = transformers.AutoModelForCausalLM.from_config(config).eval()
    reference.load_state_dict({to_hf_name(name): tensor for name, tensor in model.state_dict().items()})
    return reference
