"""The same model as a Hugging Face folder, both ways: config.json, generation_config.json and safetensors."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from thinker.checkpoint.checkpoint import CorruptCheckpoint, model_tensors, opened, read_json
from thinker.data.tokenizer import Tokenizer
from thinker.model import Thinker, ThinkerConfig
from thinker.model.rope import RopeScaling
from thinker.runtime.errors import UserError, did_you_mean

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "smollm3")
INDEX, SINGLE, HEAD = "model.safetensors.index.json", "model.safetensors", "lm_head.weight"
SHARD_BYTES = 5 << 30
NAMES = {
    "embedding": "model.embed_tokens",
    "norm": "model.norm",
    "lm_head": "lm_head",
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "attention": "self_attn",
    "blocks": "model.layers",
}
SIZES = {  # their name -> ours
    "vocab_size": "vocab_size",
    "hidden_size": "d_model",
    "intermediate_size": "d_ff",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "max_position_embeddings": "max_seq_len",
}
# Keys that leave the result as it is only at one value.
FIXED = {"hidden_act": "silu", "mlp_bias": False, "attention_bias": False, "partial_rotary_factor": 1.0}
FIXED |= {"quantization_config": None, "is_encoder_decoder": False, "rope_interleaved": False, "use_mrope": False}
FIXED |= {"per_layer_config": None, "auto_map": None, "is_decoder": False, "add_cross_attention": False}
FIXED |= {"pruned_heads": {}, "neftune_noise_alpha": None}
READ = {"model_type", "num_key_value_heads", "head_dim", "rms_norm_eps", "tie_word_embeddings", "rope_theta", *SIZES}
READ |= {"rope_scaling", "rope_parameters", "sliding_window", "use_sliding_window", "max_window_layers", "layer_types"}
READ |= {"no_rope_layers", "no_rope_layer_interval", "original_max_position_embeddings", "architectures"}
TYPES = dict.fromkeys(("architectures", "layer_types", "no_rope_layers"), list)  # what nothing else checks
TYPES |= dict.fromkeys(("rope_scaling", "rope_parameters"), dict) | {"use_sliding_window": bool}
TYPES |= dict.fromkeys(("sliding_window", "max_window_layers", "no_rope_layer_interval"), int)
TYPES |= dict.fromkeys(("original_max_position_embeddings", *SIZES), int)
WANTED = {list: "a list", dict: "a mapping", bool: "true or false", int: "a whole number above 0"}
# Keys that do not decide what the model computes.
HARMLESS = {"torch_dtype", "dtype", "transformers_version", "use_cache", "initializer_range", "attention_dropout"}
HARMLESS |= {
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "unk_token_id",
    "pretraining_tp",
    "tokenizer_class",
    "_name_or_path",
}
HARMLESS |= {"max_length", "min_length", "do_sample", "temperature", "top_k", "top_p", "repetition_penalty"}
HARMLESS |= {"num_beams", "output_scores", "use_bfloat16", "gradient_checkpointing", "_flash_attn_2_enabled"}
HARMLESS |= {"return_dict", "output_attentions", "output_hidden_states", "id2label", "label2id", "problem_type"}
HARMLESS |= {"chunk_size_feed_forward", "torchscript", "model_name", "is_llama_config", "transformers.js_config"}
HARMLESS |= {"unsloth_version", "unsloth_fixed", "_attn_implementation_autoset", "_attn_implementation"}
SCALING = {  # their name -> ours, of what a type of RoPE scaling reads
    "factor": "factor",
    "original_max_position_embeddings": "original_max_seq_len",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "attention_factor": "attention_factor",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "mscale": "mscale",
    "mscale_all_dim": "mscale_all_dim",
    "truncate": "truncate",
}


def is_hf_folder(path: Path) -> bool:
    """Whether a folder looks like one of theirs."""
    return os.path.isfile(path / "config.json") and not os.path.isfile(path / "state.json")


# There to here


def load_pretrained(folder: Path, device: torch.device | str = "cpu") -> Thinker:
    """The model in a Hugging Face folder, ready to sample from, in fp32.

    Raises UserError for a family or a key that is not known, CorruptCheckpoint if files are missing or do not fit.
    """
    config = from_hf_config(read_json(folder / "config.json"))
    where = _find_tensors(folder)
    if config.n_layers > len(where):  # or building so many blocks could take for ever
        raise CorruptCheckpoint(f"{folder} has fewer tensors than its configuration has layers ({config.n_layers})")
    with torch.device("meta"):
        model = Thinker(config)  # no memory for weights that are about to be replaced
    expected = {to_hf_name(name): name for name in model_tensors(model)}
    surplus = {name for name in where if name.endswith("rotary_emb.inv_freq")}  # old files hold the angles too
    surplus |= {HEAD} if config.tie_embeddings else set()
    if missing := sorted(expected.keys() - where.keys()):
        raise CorruptCheckpoint(f"{folder} has no tensor {missing[0]}")
    if unknown := sorted(where.keys() - expected.keys() - surplus):
        raise UserError(f"{folder} has a tensor {unknown[0]}, which a {config_family(folder)} does not have")
    tensors, shapes = {}, model.state_dict()
    for path in sorted(set(where.values())):
        with opened(path) as file:
            for name in (name for name in expected if where[name] == path):
                part, like = file.get_slice(name), shapes[expected[name]]
                if part.get_dtype() not in ("F32", "BF16", "F16") or part.get_shape() != list(like.shape):
                    found = f"{part.get_dtype()} {part.get_shape()}"
                    raise CorruptCheckpoint(f"{path}: {name} is {found}; its configuration asks for {list(like.shape)}")
                tensors[expected[name]] = file.get_tensor(name).float()
    if config.tie_embeddings and HEAD in where:  # whether it is used then has changed with their versions
        with opened(where[HEAD]) as file:
            if not torch.equal(file.get_tensor(HEAD).float(), tensors["embedding.weight"]):
                raise UserError(f"{folder}: {HEAD} differs from the embedding, but config.json ties them")
    model.load_state_dict(tensors, strict=not config.tie_embeddings, assign=True)
    if config.tie_embeddings:
        model.lm_head.weight = model.embedding.weight
    return model.to(device).eval()


def config_family(folder: Path) -> str:
    """The model_type of a folder."""
    return str(read_json(folder / "config.json").get("model_type"))


def to_hf_name(name: str) -> str:
    """What they call one of our parameters."""
    return ".".join(NAMES.get(part, part) for part in name.split("."))


def _find_tensors(folder: Path) -> dict[str, Path]:
    """Name of each tensor -> the file it lies in. As transformers does, one file goes before an index."""
    if (folder / SINGLE).is_file():
        with opened(folder / SINGLE) as file:
            return dict.fromkeys(file.keys(), folder / SINGLE)
    if not (folder / INDEX).is_file():
        pickled = next(iter([*folder.glob("*.bin"), *folder.glob("*.pth"), *folder.glob("*.pt")]), None)
        hint = f"; {pickled.name} is a pickle, which can run anything: convert it to safetensors" if pickled else ""
        raise CorruptCheckpoint(f"{folder} has neither {SINGLE} nor {INDEX}{hint}")
    listed = read_json(folder / INDEX).get("weight_map")
    if not isinstance(listed, dict) or not all(re.fullmatch(r"[\w.-]+\.safetensors", str(f)) for f in listed.values()):
        raise CorruptCheckpoint(f"{folder / INDEX} lists no files of tensors")
    return {name: folder / file for name, file in listed.items()}


def from_hf_config(values: dict[str, Any]) -> ThinkerConfig:
    """Our configuration of what a config.json describes. Raises UserError that names what is not known here."""
    family = values.get("model_type")
    if family not in FAMILIES:
        raise UserError(
            f"config.json: model_type is {family!r}; known are {', '.join(FAMILIES)}"
            f"{did_you_mean(str(family), FAMILIES)}"
        )
    windowless = "sliding_window" in values and values["sliding_window"] is None  # where left out, Mistral has one
    headless = "num_key_value_heads" in values and values["num_key_value_heads"] is None  # as many as query heads
    values = {name: value for name, value in values.items() if value is not None}
    for name, kind in TYPES.items():
        value = values.get(name)
        if value is not None and (type(value) is not kind or (kind is int and value < (name != "max_window_layers"))):
            raise UserError(f"config.json: {name} is {value!r}; {WANTED[kind]} is wanted")
    for name, value in values.items():
        if name in FIXED and value != FIXED[name] and not (name == "attention_bias" and family == "qwen2"):
            raise UserError(f"config.json: {name} is {value!r}; Thinker computes with {FIXED[name]!r}")
        if name not in READ | FIXED.keys() | HARMLESS:
            raise UserError(f"config.json has a key {name}, which may change what a {family} computes: it is not known")
    if not any(str(name).endswith("ForCausalLM") for name in values.get("architectures", ["ForCausalLM"])):
        raise UserError(f"config.json: architectures is {values['architectures']}; a language model is wanted")
    if missing := [name for name in SIZES if name not in values]:
        raise UserError(f"config.json lacks {missing[0]}")
    if family != "llama" and "num_key_value_heads" not in values and not headless:
        raise UserError("config.json lacks num_key_value_heads")
    theta, scaling = _read_rope(values, 2e6 if family == "smollm3" else 1e4)
    given = {ours: values[theirs] for theirs, ours in SIZES.items()}
    given |= {"n_kv_heads": values.get("num_key_value_heads"), "rope_theta": theta, "rope_scaling": scaling}
    given |= {"head_dim": values.get("head_dim", 128 if family == "qwen3" else None)}
    given |= {"norm_eps": values.get("rms_norm_eps", 1e-6), "qk_norm": family == "qwen3"}
    given |= {"tie_embeddings": values.get("tie_word_embeddings", family == "smollm3")}
    given |= {"attention_bias": family == "qwen2", "init": "fan_in"}
    given = {name: value for name, value in given.items() if value is not None}
    plain = ThinkerConfig.from_dict(given)  # refuses numbers that are none, before lists are made of them
    if family == "smollm3":
        every = values.get("no_rope_layer_interval", 4)
        kept = values.get("no_rope_layers", [int((layer + 1) % every != 0) for layer in range(plain.n_layers)])
        if len(kept) != plain.n_layers or any(one not in (0, 1) for one in kept):
            raise UserError(f"config.json: no_rope_layers is {kept}; a 0 or a 1 for each layer is wanted")
        given["no_rope_layers"] = [layer for layer in range(plain.n_layers) if not kept[layer]] or None
    values |= {"sliding_window": None} if windowless else {}
    given["attention"] = _read_windows(values, family, plain.n_layers, given.get("no_rope_layers") or [])
    return ThinkerConfig.from_dict(given)


def _read_windows(values: dict[str, Any], family: str, n_layers: int, no_rope_layers: list[int]) -> str | list[str]:
    """What each layer sees: their sliding_window is a window of ours, itself included."""
    window = values.get("sliding_window", None if family == "smollm3" else 4096)
    if family == "llama" or (family != "mistral" and not values.get("use_sliding_window", False)):
        window = None
    kinds = ["sliding_attention" if window else "full_attention"] * n_layers
    if window and family == "smollm3":
        kinds = ["sliding_attention" if i in no_rope_layers else "full_attention" for i in range(n_layers)]
    elif window and family != "mistral":
        first = values.get("max_window_layers", 28)
        kinds = ["sliding_attention" if i >= first else "full_attention" for i in range(n_layers)]
    said = values.get("layer_types", kinds)
    known = {"full_attention": "full"} | ({"sliding_attention": f"window({window})"} if window else {})
    if len(said) != n_layers or any(kind not in [*known] for kind in said):
        raise UserError(f"config.json: layer_types is {said}; for each layer one of {', '.join(known)} is wanted")
    if said != kinds and family in ("llama", "mistral"):  # where their versions differ in what they make of it
        raise UserError(f"config.json: layer_types is {said}, but all layers of this {family} are {kinds[0]}")
    layers = [known[kind] for kind in said]
    return layers[0] if len(set(layers)) == 1 else layers


def _read_rope(values: dict[str, Any], default: float) -> tuple[float, dict[str, Any] | None]:
    """The base and our scaling, from rope_scaling, which goes first, or rope_parameters."""
    given = dict(values.get("rope_scaling") or values.get("rope_parameters") or {})
    theta = given.pop("rope_theta", None) or values.get("rope_theta", default)
    kind = given.pop("rope_type", None) or given.get("type", "default")
    given = {name: value for name, value in given.items() if value is not None and name != "type"}
    if given.pop("partial_rotary_factor", 1.0) != 1.0:
        raise UserError("config.json: partial_rotary_factor must be 1: all of a head's width is rotated here")
    if kind == "default" and not given.keys() - {"original_max_position_embeddings"}:
        return theta, None
    if kind not in ("linear", "dynamic", "yarn", "llama3"):
        raise UserError(f"config.json: rope_type is {kind!r}; known are default, linear, dynamic, yarn, llama3")
    longest, original = values["max_position_embeddings"], "original_max_position_embeddings"
    if kind == "dynamic":
        given[original] = longest  # whatever else is said there
    elif kind != "linear":
        given[original] = values.get(original) or given.get(original, longest)
    if kind != "linear" and (type(given[original]) is not int or given[original] < 1):
        raise UserError(f"config.json: {original} is {given[original]!r}; {WANTED[int]} is wanted")
    if kind == "yarn":
        given.setdefault("factor", longest / given[original])
        if "attention_factor" in given or not (given.get("mscale") and given.get("mscale_all_dim")):
            given = {name: value for name, value in given.items() if not name.startswith("mscale")}
    if unknown := [name for name in given if name not in SCALING]:
        raise UserError(f"config.json: rope_scaling has a key {unknown[0]}, which is not known")
    return theta, {"type": kind} | {SCALING[name]: value for name, value in given.items()}


# Here to there


def hf_model_type(config: ThinkerConfig) -> str:
    """The family that computes what this model does. Raises UserError with the reason where there is none."""
    layers = [pattern.text for pattern in config.patterns]
    windows = {text for text in layers if text != "full"}
    reasons = {
        f"model.positions={config.positions}": config.positions != "rope",
        "model.attn_logit_softcap": config.attn_logit_softcap is not None,
        "model.attention_sinks": config.attention_sinks,
        "model.n_kv_heads_per_layer": config.n_kv_heads_per_layer is not None,
        "model.attention_bias beside model.qk_norm": config.attention_bias and config.qk_norm,
        f"model.attention={config.attention}": len(windows) > 1
        or not all(re.fullmatch(r"window\(\d+\)", text) for text in windows),
    }
    if reason := next((reason for reason, found in reasons.items() if found), None):
        raise UserError(f"no family of transformers computes a model with {reason}; it cannot be exported")
    if config.no_rope_layers:
        if config.qk_norm or config.attention_bias or windows:
            raise UserError("only smollm3 has model.no_rope_layers, and neither QK-norm, biases nor windows with it")
        return "smollm3"
    if config.qk_norm or config.attention_bias:
        return "qwen3" if config.qk_norm else "qwen2"
    if windows and "full" in layers:
        raise UserError("without QK-norm or biases, no family of transformers has windows in some layers only")
    return "mistral" if windows else "llama"


def to_hf_config(config: ThinkerConfig, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """A config.json of this model, in keys that older versions read too. Raises UserError as hf_model_type."""
    family = hf_model_type(config)
    values = {"architectures": [ARCHITECTURES[family]], "model_type": family}
    values |= {theirs: getattr(config, ours) for theirs, ours in SIZES.items()}
    values |= {"num_key_value_heads": config.n_kv_heads, "head_dim": config.head_dim, "hidden_act": "silu"}
    values |= {"rms_norm_eps": config.norm_eps, "rope_theta": config.rope_theta, "rope_scaling": None}
    values |= {"tie_word_embeddings": config.tie_embeddings, "attention_dropout": 0.0, "use_cache": True}
    values |= {"initializer_range": 0.02, "torch_dtype": "float32", **special_token_ids(tokenizer)}
    if family in ("llama", "qwen3", "smollm3"):
        values |= {"attention_bias": False}
    if family in ("llama", "smollm3"):
        values |= {"mlp_bias": False}
    if config.rope_scaling is not None:
        ours = {
            name: value for name, value in vars(RopeScaling.from_dict(config.rope_scaling)).items() if value is not None
        }
        kind, names = ours.pop("type"), {our: their for their, our in SCALING.items()}
        if kind == "dynamic":  # they take the length of the pretraining from here
            values["max_position_embeddings"] = ours.pop("original_max_seq_len")
        values["rope_scaling"] = {"rope_type": kind} | {names[name]: value for name, value in ours.items()}
    layers = [pattern.text for pattern in config.patterns]
    window = next((int(text[7:-1]) for text in layers if text != "full"), None)
    if family == "mistral":
        values["sliding_window"] = window
    elif family in ("qwen2", "qwen3"):
        kinds = ["full_attention" if text == "full" else "sliding_attention" for text in layers]
        first = kinds.index("sliding_attention") if window else config.n_layers
        values |= {"use_sliding_window": window is not None, "sliding_window": window, "max_window_layers": first}
        values |= {"layer_types": kinds}
    elif family == "smollm3":
        values["no_rope_layers"] = [int(layer not in config.no_rope_layers) for layer in range(config.n_layers)]
    return values


ARCHITECTURES = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM"}
ARCHITECTURES |= {"qwen3": "Qwen3ForCausalLM", "smollm3": "SmolLM3ForCausalLM"}


def special_token_ids(tokenizer: Tokenizer | None) -> dict[str, Any]:
    """bos, eos and pad, always written: the families' own defaults are ids of other vocabularies."""
    if tokenizer is None:
        return dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    eos = tokenizer.eos_ids if len(tokenizer.eos_ids) > 1 else tokenizer.eos_id
    return {"bos_token_id": tokenizer.bos_id, "eos_token_id": eos, "pad_token_id": tokenizer.eos_id}


def save_pretrained(model: Thinker, tokenizer: Tokenizer | None, folder: Path, shard_bytes: int = SHARD_BYTES) -> None:
    """Write config.json, generation_config.json and the weights into an existing, empty folder.

    Weights keep their precision; beyond `shard_bytes` they are cut into several files with an index. Raises UserError
    where no family computes what this model does.
    """
    config = to_hf_config(model.config, tokenizer)
    dtypes = {tensor.dtype for tensor in model.state_dict().values()}
    config["torch_dtype"] = str(dtypes.pop()).removeprefix("torch.")
    dump(folder / "config.json", config)
    dump(folder / "generation_config.json", special_token_ids(tokenizer) | {"_from_model_config": False})
    shards: list[dict[str, Tensor]] = [{}]
    for name, tensor in model_tensors(model).items():
        held = sum(one.nbytes for one in shards[-1].values())
        if shards[-1] and held + tensor.nbytes > shard_bytes:
            shards.append({})
        shards[-1][to_hf_name(name)] = tensor.detach().cpu().contiguous()
    files = [f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors" for number in range(len(shards))]
    if len(shards) == 1:
        files = ["model.safetensors"]
    for file, tensors in zip(files, shards):
        save_file(tensors, folder / file, metadata={"format": "pt"})
        shutil.copymode(folder / "config.json", folder / file)  # it would be the owner's alone
    if len(shards) > 1:
        where = {name: file for file, tensors in zip(files, shards) for name in tensors}
        total = sum(tensor.nbytes for tensors in shards for tensor in tensors.values())
        dump(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": where})


def dump(path: Path, values: dict[str, Any]) -> None:
    """A JSON file for people to read too."""
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
