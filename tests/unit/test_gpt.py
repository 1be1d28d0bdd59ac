"""GPT in the forms of today's families: compared with transformers, nn.MultiheadAttention and formulas."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from shardwright.errors import UserError
from shardwright.jagged import Batch, Jagged
from shardwright.layers.decoder import GPT2, LLAMA, QWEN2, QWEN3, DecoderAttention, DecoderBlock, rotations
from shardwright.models.gpt import GPT
from shardwright.models.huggingface import from_config, load_pretrained, load_weights, save_pretrained, to_config

FORMS = {"gpt2": GPT2, "llama": LLAMA, "qwen2": QWEN2, "qwen3": QWEN3, "llama, tied": replace(LLAMA, tied=True)}


def make_model(form=LLAMA, num_kv_heads: int = 2) -> GPT:
    torch.manual_seed(1)
    shape = {"vocabulary": 40, "context": 12, "channels": 32, "num_blocks": 3, "num_heads": 4, "hidden": 48}
    model = GPT(**shape, num_kv_heads=num_kv_heads, form=form)
    for parameter in model.parameters():  # no norm of ones, no bias of zeros
        nn.init.normal_(parameter, std=0.2)
    return model


def tokens(num_samples: int = 3, num_tokens: int = 10) -> Batch:
    ids = torch.randint(0, 40, (num_samples, num_tokens + 1), generator=torch.Generator().manual_seed(0))
    lengths = torch.full((1, num_samples), num_tokens)
    return Batch(Jagged(("tokens",), ids[:, :-1].flatten(), lengths), None, {"next": ids[:, 1:]})


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_every_form_is_causal_and_trains(form):
    model, batch = make_model(form), tokens()
    ids = batch.features.values.view(3, 10).clone()
    ids[:, 6] = (ids[:, 6] + 1) % 40
    edited = replace(batch, features=replace(batch.features, values=ids.flatten()))
    before, after = model(batch), model(edited)
    assert torch.equal(before[:, :6], after[:, :6]) and not torch.equal(before[:, 6:], after[:, 6:])
    model.loss(before, batch).backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in model.parameters())
    assert (model.head.linear.weight is model.embed.token.weight) == form.tied
    assert (model.embed.position is None) == bool(form.rotary_base)


def test_grouped_query_attention_repeats_keys_and_values():
    form = replace(LLAMA, rotary_base=0.0)
    grouped, full = DecoderAttention(32, 4, 2, form).double(), DecoderAttention(32, 4, 4, form).double()
    with torch.no_grad():
        for name in ("query", "out"):
            getattr(full, name).weight.copy_(getattr(grouped, name).weight)
        for name in ("key", "value"):
            heads = getattr(grouped, name).weight.view(2, 8, 32)
            getattr(full, name).weight.copy_(heads.repeat_interleave(2, dim=0).flatten(0, 1))
    x = torch.randn(2, 7, 32, dtype=torch.float64)
    torch.testing.assert_close(grouped(x), full(x))


def test_attention_equals_torch_multihead_attention():
    attention = DecoderAttention(32, 4, 4, GPT2).double()
    reference = nn.MultiheadAttention(32, 4, batch_first=True).double()
    with torch.no_grad():
        linears = (attention.query, attention.key, attention.value)
        reference.in_proj_weight.copy_(torch.cat([linear.weight for linear in linears]))
        reference.in_proj_bias.copy_(torch.cat([linear.bias for linear in linears]))
        reference.out_proj.load_state_dict(attention.out.state_dict())
    x = torch.randn(2, 7, 32, dtype=torch.float64)
    mask = torch.ones(7, 7, dtype=torch.bool).triu(1)
    torch.testing.assert_close(attention(x), reference(x, x, x, attn_mask=mask, need_weights=False)[0])


def test_rotary_positions_depend_on_distances_only():
    cos, sin = rotations(9, 8, 10_000.0, torch.empty(0, dtype=torch.float64))
    assert torch.equal(cos[0], torch.ones(8, dtype=torch.float64)) and not sin[0].any()
    query, key = torch.randn(2, 8, dtype=torch.float64)

    def rotate(x, position):
        low, high = x.chunk(2)
        return x * cos[position] + torch.cat([-high, low]) * sin[position]

    torch.testing.assert_close(rotate(query, 7) @ rotate(key, 4), rotate(query, 3) @ rotate(key, 0))
    assert not torch.allclose(rotate(query, 7) @ rotate(key, 4), rotate(query, 7) @ rotate(key, 5))


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((30, 4, 2), "30 channels, 4 heads and 2 heads of keys and values: each number must be a multiple of the next"),
        ((32, 4, 3), "32 channels, 4 heads and 3 heads of keys and values"),
        ((12, 4, 4), "rotary positions need an even number of channels a head, not 3"),
    ],
)
def test_impossible_heads_are_refused(shape, message):
    with pytest.raises(UserError, match=message):
        DecoderBlock(*shape)


@pytest.mark.parametrize(
    "form",
    [
        *(replace(form, tied=tied) for form in (LLAMA, QWEN2, QWEN3) for tied in (False, True)),
        replace(LLAMA, biases="attention"),
        replace(QWEN3, head_width=16),
    ],
)
def test_logits_equal_those_of_transformers(tmp_path, form):
    """Both ways: our folder read by transformers, and theirs read by us, also in several files."""
    transformers = pytest.importorskip("transformers")
    model = make_model(form)
    save_pretrained(model, tmp_path / "ours")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", attn_implementation="eager").eval()
    batch = tokens()
    ids = batch.features.values.view(3, 10)
    with torch.no_grad():
        expected = theirs(ids).logits
        torch.testing.assert_close(model(batch), expected, rtol=1e-4, atol=1e-4)
        theirs.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
        assert len([*(tmp_path / "theirs").glob("*.safetensors")]) > 1
        torch.testing.assert_close(load_pretrained(tmp_path / "theirs")(batch), model(batch), rtol=0, atol=0)


@pytest.mark.parametrize(
    "form", [LLAMA, QWEN2, QWEN3, replace(QWEN3, head_width=16), replace(LLAMA, biases="attention", tied=True)]
)
def test_a_folder_loads_the_same_model(tmp_path, form):
    model = make_model(form)
    save_pretrained(model, tmp_path)
    again = load_pretrained(tmp_path)
    assert again.form == form and to_config(again) == json.loads((tmp_path / "config.json").read_text())
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in model.state_dict().items())


def test_files_that_do_not_fit_are_refused_by_name(tmp_path):
    model = make_model()
    save_pretrained(model, tmp_path)
    path = tmp_path / "model.safetensors"
    weights = load_file(path)

    def refusal(changed) -> str:
        save_file(changed, path)
        with pytest.raises(UserError) as error:
            load_weights(model, tmp_path)
        return str(error.value)

    name = "model.layers.1.mlp.up_proj.weight"
    assert f'"{name}" is missing' in refusal({key: value for key, value in weights.items() if key != name})
    assert f'"{name}s" is not in this model; did you mean "{name}"?' in refusal(
        weights | {f"{name}s": weights[name].clone()}
    )
    assert f'"{name}" has shape (2, 2); this model has (48, 32)' in refusal(weights | {name: torch.zeros(2, 2)})
    path.write_text("text")
    with pytest.raises(UserError, match="not a safetensors file"):
        load_weights(model, tmp_path)
    with pytest.raises(UserError, match="has neither model.safetensors nor model.safetensors.index.json"):
        load_weights(model, tmp_path / "absent")
    with pytest.raises(UserError, match="config.json: cannot be read"):
        load_pretrained(tmp_path / "absent")


def test_settings_that_gpt_does_not_have_are_refused(tmp_path):
    config = to_config(make_model())
    save_pretrained(make_model(), tmp_path)
    for change, message in (
        ({"model_type": "mistral"}, "model_type is 'mistral'; allowed: llama, qwen2, qwen3"),
        ({"rope_scaling": {"factor": 8.0}}, "rope_scaling is {'factor': 8.0}; this version has None only"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type is 'yarn'; this version has \"default\" only"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; this version has 'silu' only"),
    ):
        with pytest.raises(UserError, match=message.replace("{", r"\{").replace("}", r"\}")):
            from_config(config | change)
    with pytest.raises(UserError, match='config: "vocab_size" is missing'):
        from_config({key: value for key, value in config.items() if key != "vocab_size"})
    assert from_config({key: value for key, value in config.items() if key != "rope_theta"}).form.rotary_base == 1e4
    with torch.device("meta"):
        blank = make_model()
    with pytest.raises(UserError, match="is on the meta device: load after build"):
        load_weights(blank, tmp_path)
    model = make_model()
    model.head.linear.weight = nn.Parameter(model.head.linear.weight[:20].detach())
    with pytest.raises(
        UserError, match=r'"lm_head.weight" has \(20, 32\) of \(40, 32\) on this rank: the model is shard'
    ):
        save_pretrained(model, tmp_path / "part")
    assert not (tmp_path / "part").exists()
    with pytest.raises(UserError, match="is not a form of llama, qwen2, qwen3"):
        to_config(make_model(GPT2))
