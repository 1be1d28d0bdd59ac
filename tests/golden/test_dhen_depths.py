"""The published DHEN setting, simulated: choices of the planner and of the paper's rule by number of layers."""

import pytest

from benchmarks import dhen_published
from benchmarks.dhen_published import Setting

CHOSEN = {  # by number of layers: strategies chosen by the planner and by the paper's rule
    8: ("HSDP", "DDP"),
    22: ("HSDP", "DDP"),
    23: ("HSDP", "HSDP"),
    37: ("HSDP", "HSDP"),
    38: ("HSDP + selective (2 of 38)", "FSDP"),
    41: ("HSDP + selective (11 of 41)", "HSDP + selective"),
}


@pytest.fixture(scope="module")
def weight_bytes() -> float:
    return dhen_published.fit_layer_bytes(Setting())


@pytest.mark.parametrize("layers", CHOSEN)
def test_strategy_by_number_of_layers(layers, weight_bytes):
    line = dhen_published.depth_line(layers, *dhen_published.evaluate_depth(Setting(), layers, weight_bytes))
    assert (line["chosen"], line["papers_rule"]) == CHOSEN[layers]
    assert 1.15 < line["hsdp_over_fsdp"] < 1.22  # up to a fifth in the paper


def test_most_layers_that_fit_by_strategy(weight_bytes):
    most = dhen_published.most_layers(Setting(), weight_bytes)
    assert [most[name] for name in dhen_published.PLAIN] == [dhen_published.DP_LAYERS, 37, 40]
    assert most["DDP + full"] < most["HSDP + full"] < most["FSDP + full"]
