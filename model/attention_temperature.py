"""The temperature of attention: change it in a trained model, or move it into the weights."""

import dataclasses
from collections.abc import Mapping

from torch import Tensor

from thinker.model.attention import attention_scale
from thinker.model.config import ThinkerConfig
from thinker.model.transformer import Thinker


def override_attention_temperature(model: Thinker, temperature: float) -> None:
    """Divide the attention scores of all layers by another temperature: below 1, heads attend to
    fewer keys.

    Raises UserError as for model.attention_temperature. A Generator keeps the temperature that it
    was created with.
    """
    model.config = dataclasses.replace(model.config, attention_temperature=temperature)
    for block in model.blocks:
        block.attention.scale = attention_scale(model.config)


def fold_attention_temperature(
    tensors: Mapping[str, Tensor], config: ThinkerConfig
) -> dict[str, Tensor]:
    """The parameters of a model of temperature 1 that computes the same, for formats without a
    temperature.

    `tensors` are those of a model with `config`, by name. Divided by the temperature are the norm
    weights of the queries or, without QK-norm, their projection; RoPE, which follows, is linear.
    Others are returned unchanged.
    """
    if config.attention_temperature == 1:
        return dict(tensors)
    names = ("q_norm.weight", "q_norm.bias")
    if not config.qk_norm:
        names = ("q_proj.weight", "q_proj.bias")
    folded = dict(tensors)
    offset = 0  # a factor minus what is stored
    if config.qk_norm and config.qk_norm_type == "rmsnorm_one_plus":
        offset = 1
    for name, tensor in tensors.items():
        if name.endswith(names):
            folded[name] = (tensor + offset) / config.attention_temperature - offset
    return folded
