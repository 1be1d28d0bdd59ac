"""Load and save GPT in the layout that Hugging Face uses for Llama and Qwen: config.json and safetensors files.

Nothing of the transformers library is needed. The classes of the layout: LlamaForCausalLM, Qwen2ForCausalLM,
Qwen3ForCausalLM.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from shardwright.errors import UserError, did_you_mean
from shardwright.layers.decoder import LLAMA, QWEN2, QWEN3, DecoderBlock, DecoderForm, SwiGlu
from shardwright.models.gpt import GPT

DEFAULT_ROTARY_BASE = 10_000.0  # of a config without one
REQUIRED_KEYS = (
    *("hidden_size", "num_attention_heads", "num_hidden_layers", "intermediate_size", "vocab_size"),
    *("max_position_embeddings", "rms_norm_eps"),
)
CONFIG_FILE, WEIGHTS_FILE, INDEX_FILE = "config.json", "model.safetensors", "model.safetensors.index.json"
FORMS = MappingProxyType({"llama": LLAMA, "qwen2": QWEN2, "qwen3": QWEN3})  # by model_type
CLASSES = MappingProxyType({"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"})
# Our names in a block, and theirs.
BLOCK_NAMES = MappingProxyType(
    {
        "norm1": "input_layernorm",
        "attention.query": "self_attn.q_proj",
        "attention.key": "self_attn.k_proj",
        "attention.value": "self_attn.v_proj",
        "attention.out": "self_attn.o_proj",
        "attention.query_norm": "self_attn.q_norm",
        "attention.key_norm": "self_attn.k_norm",
        "norm2": "post_attention_layernorm",
        "mlp.gate": "mlp.gate_proj",
        "mlp.up": "mlp.up_proj",
        "mlp.down": "mlp.down_proj",
    }
)
OTHER_NAMES = MappingProxyType(
    {"embed.token": "model.embed_tokens", "head.norm": "model.norm", "head.linear": "lm_head"}
)


def load_pretrained(folder: str | Path) -> GPT:
    """The model of a folder with config.json and its weights."""
    folder = Path(folder)
    config = _read_json(folder / CONFIG_FILE)
    with torch.device("meta"):
        model = from_config(config, str(folder / CONFIG_FILE))
    model = model.to_empty(device="cpu")
    if model.form.tied:
        model.head.linear.weight = model.embed.token.weight
    load_weights(model, folder)
    return model


def from_config(config: Mapping[str, Any], origin: str = "config") -> GPT:
    """A model of these shapes with initial weights; a setting that GPT does not have is an error."""
    kind = str(config.get("model_type"))
    if kind not in FORMS:
        raise UserError(f"{origin}: model_type is {config.get('model_type')!r}; allowed: {', '.join(FORMS)}")
    for key in REQUIRED_KEYS:
        if key not in config:
            raise UserError(f'{origin}: "{key}" is missing')
    channels, heads = config["hidden_size"], config["num_attention_heads"]
    wanted: dict[str, tuple[Any, ...]] = {
        "hidden_act": ("silu",),
        "rope_scaling": (None,),
        "mlp_bias": (None, False),
        "use_sliding_window": (None, False),
        "attention_bias": (None, False) if kind != "llama" else (None, False, True),
    }
    for key, values in wanted.items():
        if config.get(key, values[0]) not in values:
            raise UserError(f"{origin}: {key} is {config[key]!r}; this version has {values[-1]!r} only")
    rotary = {"rope_theta": config.get("rope_theta", DEFAULT_ROTARY_BASE)} | (config.get("rope_parameters") or {})
    if rotary.get("rope_type", "default") != "default":
        raise UserError(f'{origin}: rope_type is {rotary["rope_type"]!r}; this version has "default" only')
    form = replace(
        FORMS[kind],
        norm_eps=config["rms_norm_eps"],
        rotary_base=rotary["rope_theta"],
        tied=config.get("tie_word_embeddings", False),
        head_width=0 if config.get("head_dim") in (None, channels / heads) else config["head_dim"],
    )
    if config.get("attention_bias"):
        form = replace(form, biases="attention")
    return GPT(
        vocabulary=config["vocab_size"],
        context=config["max_position_embeddings"],
        channels=channels,
        num_blocks=config["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        hidden=config["intermediate_size"],
        form=form,
    )


def load_weights(model: GPT, path: str | Path) -> None:
    """Load weights from a safetensors file, or from a folder of them; every weight must be there, and no other."""
    targets = dict(_named_weights(model))
    loaded: set[str] = set()
    for file in _weight_files(Path(path)):
        try:
            with safe_open(file, "pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118, not a dict
                    if name == "lm_head.weight" and model.form.tied:
                        continue
                    if name not in targets:
                        raise UserError(f'{file}: "{name}" is not in this model{did_you_mean(name, targets)}')
                    values = tensors.get_tensor(name)
                    if values.shape != targets[name].shape:
                        raise UserError(
                            f'{file}: "{name}" has shape {tuple(values.shape)}; '
                            f"this model has {tuple(targets[name].shape)}"
                        )
                    if targets[name].is_meta:
                        raise UserError(f'"{name}" of the model is on the meta device: load after build, or on the CPU')
                    with torch.no_grad():
                        targets[name].copy_(values)
                    loaded.add(name)
        except SafetensorError as error:
            raise UserError(f"{file}: not a safetensors file ({error})") from None
    for name in sorted(set(targets) - loaded):
        raise UserError(f'{path}: "{name}" is missing')


def save_pretrained(model: GPT, folder: str | Path) -> None:
    """Write config.json and model.safetensors, which transformers and inference engines read."""
    folder = Path(folder)
    config = to_config(model)
    weights = {name: tensor.detach().contiguous() for name, tensor in _named_weights(model)}
    with torch.device("meta"):
        whole = dict(_named_weights(from_config(config)))
    for name, tensor in weights.items():
        if tensor.shape != whole[name].shape:
            raise UserError(
                f'"{name}" has {tuple(tensor.shape)} of {tuple(whole[name].shape)} on this rank: the model is sharded; '
                "save a checkpoint, load it in one process, and save that model"
            )
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")


def to_config(model: GPT) -> dict[str, Any]:
    """The settings of config.json."""
    form, block = model.form, cast("DecoderBlock", model.blocks[0])
    attention = block.attention
    kind = next((name for name, known in FORMS.items() if _family(known) == _family(form)), None)
    if kind is None and _family(replace(form, biases="none")) == _family(LLAMA) and form.biases == "attention":
        kind = "llama"
    if kind is None:
        raise UserError(f"{form} is not a form of {', '.join(FORMS)}, whose layout this is")
    channels = model.embed.token.embedding_dim
    return {
        "architectures": [CLASSES[kind]],
        "model_type": kind,
        "vocab_size": model.embed.token.num_embeddings,
        "max_position_embeddings": model.embed.context,
        "hidden_size": channels,
        "intermediate_size": cast("SwiGlu", block.mlp).up.out_features,
        "num_hidden_layers": len(model.blocks),
        "num_attention_heads": attention.query.out_features // attention.width,
        "num_key_value_heads": attention.key.out_features // attention.width,
        "head_dim": attention.width,
        "hidden_act": "silu",
        "rms_norm_eps": form.norm_eps,
        "rope_theta": form.rotary_base,
        "attention_bias": form.biases == "attention",
        "tie_word_embeddings": form.tied,
        "torch_dtype": str(model.embed.token.weight.dtype).removeprefix("torch."),
    }


def _family(form: DecoderForm) -> tuple[Any, ...]:
    """What tells the families apart; other fields are numbers of config.json."""
    return form.norm, form.mlp, bool(form.rotary_base), form.biases, form.qk_norm, form.experts


def _named_weights(model: GPT) -> Iterator[tuple[str, Tensor]]:
    """The model's weights by their name in the layout; a tied head has none of its own."""
    for name, tensor in model.named_parameters():
        yield _layout_name(name), tensor


def _layout_name(name: str) -> str:
    module, _, kind = name.rpartition(".")
    if module in OTHER_NAMES:
        return f"{OTHER_NAMES[module]}.{kind}"
    match = re.fullmatch(r"blocks\.(\d+)\.(.+)", module)
    if match is None or match[2] not in BLOCK_NAMES:
        raise UserError(f'"{name}" has no name in the layout of {", ".join(FORMS)}')
    return f"model.layers.{match[1]}.{BLOCK_NAMES[match[2]]}.{kind}"


def _weight_files(path: Path) -> list[Path]:
    """The safetensors files of a folder, as its index lists them, or the file itself."""
    if path.is_file():
        return [path]
    if (path / INDEX_FILE).exists():
        return [path / name for name in sorted(set(_read_json(path / INDEX_FILE)["weight_map"].values()))]
    if (path / WEIGHTS_FILE).exists():
        return [path / WEIGHTS_FILE]
    raise UserError(f"{path}: has neither {WEIGHTS_FILE} nor {INDEX_FILE}")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise UserError(f"{path}: not JSON ({error})") from None
