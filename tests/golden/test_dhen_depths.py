"""The published setting of DHEN, simulated: what the planner takes, and the paper's rule, at each depth."""

import pytest

from benchmarks import dhen_published
from benchmarks.dhen_published import Setting

CHOSEN = {  # layers: the planner's way, the paper's rule
    8: ("HSDP", "DDP"),
    22: ("HSDP", "DDP"),
    23: ("HSDP", "HSDP"),
    37: ("HSDP", "HSDP"),
    38: ("HSDP + selective (2 of 38)", "FSDP"),
    41: ("HSDP + selective (11 of 41)", "HSDP + selective"),
}


@pytest.fixture(scope="module")
def weight_bytes() -> float:
    return dhen_published.fitted(Setting())


@pytest.mark.parametrize("layers", CHOSEN)
def test_choice_by_depth(layers, weight_bytes):
    told = dhen_published.told(layers, *dhen_published.depth(Setting(), layers, weight_bytes))
    assert (told["chosen"], told["papers_rule"]) == CHOSEN[layers]
    assert 1.09 < told["hsdp_over_fsdp"] < 1.12


def test_how_many_layers_each_way_holds(weight_bytes):
    most = dhen_published.most_layers(Setting(), weight_bytes)
    assert [most[name] for name in dhen_published.PLAIN] == [dhen_published.DP_LAYERS, 37, 40]
    assert most["DDP + full"] < most["HSDP + full"] < most["FSDP + full"]
