"""Transformers from Hugging Face's config.json."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardwright.errors import UserError, check_regular_file
from shardwright.spec.transformer import ExpertLayers, LatentAttention, Transformer

CONFIG_KEYS = ("model_type", "architectures", "num_hidden_layers")  # one of them is in every config.json
GATED_ACTIVATIONS = ("silu", "swish")  # with these, models of config.json have a gate; with gelu they have none
MODEL_TYPES = (
    *("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "deepseek_v2", "deepseek_v3"),
    *("kimi_k2", "gpt2", "opt", "gpt_neox"),
)
NUM_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")


def is_config(path: Path) -> bool:
    """Whether a file is a config.json by its name, or by what it has."""
    if path.suffix != ".json":
        return False
    if path.name == "config.json" or not path.is_file():
        return path.name == "config.json"
    return hasattr(config := _read_json(path), "keys") and any(key in config for key in CONFIG_KEYS)


def read_transformer(path: Path) -> Transformer:
    """The transformer that a config.json describes."""
    config = _read_json(path)
    if not hasattr(config, "keys"):
        raise UserError(f"{path}: wanted the object of a config.json, got {type(config).__name__}")
    return parse_config(config.get("text_config", config), path.parent.name or path.stem, str(path))


def _read_json(path: Path) -> Any:
    check_regular_file(path)
    try:
        return json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not JSON ({error})") from None


def parse_config(config: Mapping[str, Any], name: str, source: str) -> Transformer:
    """`source` names the config in messages."""

    def read(*keys: str, default: int | None = None) -> int:
        for key in keys:
            value = config.get(key)
            if isinstance(value, int) and not isinstance(value, bool):
                return value
            if value is not None:
                raise UserError(f"{source}: {key} is {value!r}; wanted a whole number")
        if default is None:
            raise UserError(f"{source}: no {' or '.join(keys)}; a transformer's config.json has it")
        return default

    _check_kind(config, source)
    hidden, heads = read("hidden_size", "n_embd", "d_model"), read("num_attention_heads", "n_head")
    if heads < 1 or (hidden % heads and "head_dim" not in config):
        raise UserError(f"{source}: hidden_size {hidden} does not divide into {heads} heads; add head_dim")
    latent = _parse_latent(read) if config.get("kv_lora_rank") else None
    plain_channels = read("qk_nope_head_dim") if latent else 0
    model = Transformer(
        version=1,
        name=name,
        layers=read("num_hidden_layers", "n_layer"),
        hidden=hidden,
        intermediate=read("intermediate_size", "n_inner", default=4 * hidden),
        heads=heads,
        key_value_heads=read("num_key_value_heads", default=heads),
        vocabulary=read("vocab_size"),
        head_channels=plain_channels + latent.rotary_channels if latent else read("head_dim", default=hidden // heads),
        gated=config.get("hidden_act", config.get("activation_function", "silu")) in GATED_ACTIVATIONS,
        tied=bool(config.get("tie_word_embeddings", "n_embd" in config)),
        experts=_parse_experts(config, read),
        latent=latent,
    )
    model.verify()
    return model


def _check_kind(config: Mapping[str, Any], source: str) -> None:
    """Refuse models whose layers are not those of a Transformer."""
    kind = config.get("model_type", MODEL_TYPES[0])
    if kind not in MODEL_TYPES:
        raise UserError(f"{source}: model_type is {kind!r}; this version knows {', '.join(MODEL_TYPES)}")
    if config.get("decoder_sparse_step", 1) != 1 or config.get("mlp_only_layers"):
        raise UserError(f"{source}: layers with experts among layers without them; this version has experts in all")


def _parse_latent(read: Any) -> LatentAttention:
    return LatentAttention(
        query_rank=read("q_lora_rank", default=0),
        key_value_rank=read("kv_lora_rank"),
        rotary_channels=read("qk_rope_head_dim"),
        value_channels=read("v_head_dim"),
    )


def _parse_experts(config: Mapping[str, Any], read: Any) -> ExpertLayers | None:
    if read(*NUM_EXPERTS, default=0) < 2:
        return None
    intermediate = read("moe_intermediate_size", "intermediate_size")
    return ExpertLayers(
        num=read(*NUM_EXPERTS),
        chosen=read("num_experts_per_tok"),
        intermediate=intermediate,
        shared=read("n_shared_experts", default=read("shared_expert_intermediate_size", default=0) // intermediate),
        dense_layers=read("first_k_dense_replace", default=0),
    )
