"""Transformers by name and by config.json: their parameters beside published counts, and errors."""

import json

import pytest

from shardwright.errors import UserError
from shardwright.spec.transformer import load_transformer, transformer_names
from shardwright.spec.transformer_config import parse_config, read_transformer

# In billions: all, and those that a token uses, embeddings included.
PUBLISHED = {
    "deepseek-v3": (671, 37),
    "gpt-175b": (175, 175),
    "llama-65b": (65.2, 65.2),
    "llama2-70b": (69, 69),
    "llama3-405b": (405, 405),
    "llama3-70b": (70.6, 70.6),
    "llama3-8b": (8.03, 8.03),
    "mixtral-8x7b": (46.7, 12.9),
    "qwen3-235b-a22b": (235, 22),
    "qwen3-30b-a3b": (30.5, 3.3),
    "qwen3-32b": (32.8, 32.8),
}
QWEN = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 94,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "hidden_act": "silu",
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1536,
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_of_named_transformers(name):
    model = load_transformer(name)
    everything, used = PUBLISHED[name]
    assert model.parameters / 1e9 == pytest.approx(everything, rel=0.005)
    in_use = model.matrix_parameters + (not model.tied) * model.embedding_parameters
    assert in_use / 1e9 == pytest.approx(used, rel=0.02)


def test_names():
    assert set(PUBLISHED) <= set(transformer_names())
    for name in transformer_names():
        assert load_transformer(name).name == name
    with pytest.raises(UserError, match='no model "llama2-7b"; did you mean "llama2-70b"'):
        load_transformer("llama2-7b")


def test_config_json(tmp_path):
    folder = tmp_path / "qwen3-235b-a22b"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(QWEN))
    assert read_transformer(folder / "config.json") == load_transformer("qwen3-235b-a22b")


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"num_attention_heads": None}, "no num_attention_heads or n_head"),
        ({"vocab_size": None}, "no vocab_size"),
        ({"hidden_size": "big"}, "hidden_size is 'big'; wanted a whole number"),
        ({"num_key_value_heads": 7}, "64 heads do not divide into 7 groups"),
        ({"num_experts_per_tok": 200}, "a token goes to 200 experts of 128"),
    ],
)
def test_configs_that_are_no_transformer(changes, message):
    with pytest.raises(UserError, match=message):
        parse_config({**QWEN, **changes}, "qwen", "config.json")


@pytest.mark.parametrize("text, message", [("{", "not JSON"), ("[1]", "wanted the object of a config.json, got list")])
def test_files_that_are_no_config(tmp_path, text, message):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        read_transformer(path)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"model_type": "gemma2"}, "model_type is 'gemma2'; this version knows llama"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": [0]}, "layers with experts among layers without them"),
        ({"decoder_sparse_step": 2}, "layers with experts among layers without them"),
    ],
)
def test_models_of_other_layers_are_refused(change, message):
    config = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 100}
    with pytest.raises(UserError, match=message):
        parse_config(config | change, "mine", "config.json")
    assert parse_config(config, "mine", "config.json").gated
