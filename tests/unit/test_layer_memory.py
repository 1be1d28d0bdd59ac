"""Memory of models of layers beside published figures: Kuaishou's table of best configurations and its curve over the
offloaded share, Megatron-LM's formula, and counts of parameters."""

import pytest

from benchmarks.published_layers import LIMIT, MODELS, PEAK_FLOPS, PUBLISHED, UNMODELLED
from shardwright.planner.layers.activations import AttentionKernel, layer_bytes, saved_bytes
from shardwright.planner.layers.degrees import Degrees, SequenceBatch, degree_errors
from shardwright.planner.layers.memory import stage_memory, state_bytes
from shardwright.spec.model_flops import ModelFlops
from shardwright.spec.transformer import Transformer, load_transformer

PEAKS = {"a800": 312e12, "h800": PEAK_FLOPS}
# Measured by them: most bytes allocated, 65B with 8,192 tokens on 256 ranks (t 2, c 2, p 8, d 8), by share offloaded.
RECOMPUTED = [65330982400, 62128631296, 58907405824, 55554059776, 52089073152, 48604098048]
RECOMPUTED += [45722611200, 42832735744, 38925740032, 36144916480, 32462145024]
SAVED = [72762730496, 66951784960, 61136119808, 55733856256, 50331592704, 45824813056, 39527328256, 34491172352]


@pytest.mark.parametrize("row", PUBLISHED, ids=lambda row: f"{row.model} on {row.ranks}")
def test_published_configurations(row):
    model, batch, degrees = row.transformer, row.batch, row.degrees
    assert degrees.num_ranks == row.ranks and not [*degree_errors(model, batch, degrees)]
    fullest = max(stage_memory(model, batch, degrees, LIMIT), key=lambda stage: stage.total)
    assert fullest.offload == pytest.approx(row.offload, abs=0.0006)
    assert (fullest.total + UNMODELLED) / 1e9 == pytest.approx(row.gb, abs=0.06)
    assert fullest.host / 1e9 == pytest.approx(row.host_gb, rel=0.01, abs=0.05)
    flops = ModelFlops(
        1, model.matrix_parameters, model.attention_width, row.length, row.ranks, PEAK_FLOPS, "published"
    )
    assert 100 * flops.utilization(row.tokens_per_second)["mfu"] == pytest.approx(row.mfu, abs=0.06)


@pytest.mark.parametrize(
    "recompute, measured, first", [("memory-bound", RECOMPUTED, 0.0), ("none", SAVED, 0.3)], ids=["recomputed", "saved"]
)
def test_measured_memory_by_offloaded_share(recompute, measured, first):
    model, batch = MODELS["65B"], SequenceBatch(256, 8192)
    for number, bytes_ in enumerate(measured):
        offload = (first + number / 10,) * 8
        degrees = Degrees((2,) * 40, tensor=2, context=2, pipeline=8, data=8, recompute=recompute, offload=offload)
        total = stage_memory(model, batch, degrees, 0.0)[0].total + UNMODELLED
        assert total == pytest.approx(bytes_, rel=0.021), offload[0]


def test_published_demo_of_7b():
    model, batch = MODELS["7B"], SequenceBatch(8, 12_288)
    for share, mib in ((0.10, 64_877), (0.09, 65_216)):
        degrees = Degrees((1,) * 32, pipeline=4, recompute="memory-bound", offload=(share,) * 4)
        assert stage_memory(model, batch, degrees, 0.0)[0].total / 2**20 == pytest.approx(mib, abs=1)


def test_published_utilization_of_7b():
    model = MODELS["7B"]
    for peak, tokens, causal, full in (
        *(("a800", 3016, 47.7, 57.0), ("a800", 3803, 60.1, 71.9), ("a800", 2847, 45.0, 53.8)),
        *(("h800", 6639, 33.1, 39.6), ("h800", 8273, 41.2, 49.3), ("h800", 6138, 30.6, 36.6)),
    ):
        flops = ModelFlops(1, model.matrix_parameters, model.attention_width, 12_288, 1, PEAKS[peak], "published")
        utilization = flops.utilization(tokens)
        assert round(100 * utilization["mfu"], 1) == causal and round(100 * utilization["mfu_full"], 1) == full


def test_activations_of_175b_with_32k_tokens():
    model, batch = MODELS["175B"], SequenceBatch(1, 32_768)
    for context, published in ((1, 180), (4, 45)):
        degrees = Degrees((96,), tensor=8, context=context)
        saved = sum(sum(layer_bytes(model, layer, batch, degrees).values()) for layer in range(model.layers))
        assert saved / 1e9 == pytest.approx(published, abs=0.5)


def test_activations_as_in_megatron():
    """Korthikanti et al., MLSys 2023, table 2: bytes of a layer are s b h (34 + 5 a s / h) / t and less."""
    model = Transformer(1, "gpt", 1, 4096, 4 * 4096, 32, 32, 51_200, 128, gated=False)
    s, b, h, a, t = 2048, 4, 4096, 32, 8
    attention, batch = AttentionKernel(stores_scores=True, dropout=True), SequenceBatch(b, s, b)

    def saved(**degrees):
        return sum(layer_bytes(model, 0, batch, Degrees((1,), **degrees), attention).values())

    assert saved() == s * b * h * (34 + 5 * a * s / h)
    assert saved(tensor=t, sequence_parallel=False) == s * b * h * (10 + 24 / t + 5 * a * s / (h * t))
    assert saved(tensor=t) == s * b * h / t * (34 + 5 * a * s / h)
    assert saved(tensor=t, recompute="scores") == s * b * h / t * 34
    assert saved(tensor=t, recompute="full") == s * b * h / t * 2


def test_full_recomputation_holds_one_whole_layer():
    """Korthikanti et al., section 5: layer inputs, and all activations of the layer whose backward runs."""
    model, batch = MODELS["7B"], SequenceBatch(1, 4096)
    whole, inputs = (
        saved_bytes(model, 0, batch, Degrees((32,), recompute=recompute)) for recompute in ("none", "full")
    )
    stage = stage_memory(model, batch, Degrees((32,), recompute="full"), 80e9)[0]
    assert stage.activations == pytest.approx(31 * inputs + whole) and not stage.offload


def test_logits_of_the_last_pipeline_rank():
    """PyTorch's cross entropy, measured: 12 bytes of a logit live at its peak, besides the logits in bfloat16."""
    model, batch = MODELS["7B"], SequenceBatch(4, 4096, 2)
    stages = stage_memory(model, batch, Degrees((16, 16), tensor=2, pipeline=2), 80e9)
    assert [stage.logits for stage in stages] == [0, 12 * 2 * 4096 * model.vocabulary / 2]


def test_states_of_175b():
    """The talk's 2,800 GB: 16 bytes a weight, of 16-bit weights and gradients, and float32 weights and two moments."""
    assert 16 * load_transformer("gpt-175b").parameters / 1e9 == pytest.approx(2800, rel=0.01)


def test_states_of_zero():
    model = MODELS["7B"]
    parameters = model.parameters
    for zero, published in ((0, 18), (1, 6 + 12 / 64), (2, 2 + 16 / 64), (3, 18 / 64)):
        degrees = Degrees((32,), data=64, zero=zero)
        assert sum(state_bytes(model, degrees, 0)) == pytest.approx(published * parameters)
