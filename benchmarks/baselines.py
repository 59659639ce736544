"""The peers that we are measured beside, with the same weights."""

from __future__ import annotations

from typing import Any

from thinker.interop.huggingface import to_hf_config, to_hf_name
from thinker.model import Thinker


def as_transformers(model: Thinker) -> Any:
    """The same model as transformers' own, of the family that computes what it does, in fp32."""
    import transformers

    config = to_hf_config(model.config, None)
    family = config.pop("model_type")
    other = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(family, **config)).eval()
    other.load_state_dict({to_hf_name(name): tensor for name, tensor in model.state_dict().items()})
    return other
