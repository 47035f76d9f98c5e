"""Mixture of experts: the layer against transformers, and every layout with experts against one process in float64."""

import pytest

from tests.test_layouts import (
    CP,
    PP,
    REPLICATE,
    SHARD,
    TOLERANCE,
    TP,
    ULYSSES,
    with_batches,
    world_size,
)
from tests.test_parity import compare

EXPERTS = {
    "model__moe__n_experts": 4,
    "model__moe__n_experts_per_token": 2,
    "model__moe__expert_dim": 24,
    "model__moe__n_shared_experts": 1,
    "model__moe__n_first_dense_layers": 1,
    "model__moe__normalize_scores": True,
}
EP = {"expert_parallel_degree": 2}
LAYOUTS = {
    "shard": SHARD,
    "tp": TP,
    "pp": PP,
    "cp": CP,
    "shard, ep": SHARD | EP,
    "shard 4, ep": {"data_parallel_shard_degree": 4} | EP,
    "shard 4, ep 4": {"data_parallel_shard_degree": 4, "expert_parallel_degree": 4},
    "tp, ep": TP | EP,
    "cp, ep": CP | EP,
    "ulysses, ep": ULYSSES | EP,
    "replicate x shard, ep": REPLICATE | SHARD | EP,
    "shard x tp, ep 4": SHARD | TP | {"expert_parallel_degree": 4},
    "shard x tp, ep": SHARD | TP | EP,
    "shard x tp": SHARD | TP,
    "cp x tp, ep": CP | TP | EP,
    "pp x shard, ep": PP | SHARD | EP,
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_matches_reference(ranks, tmp_path, name):
    layout = EXPERTS | LAYOUTS[name]
    actual = compare(ranks, tmp_path, world_size(layout), with_batches(layout))
    assert {name: d for name, d in actual.items() if d > TOLERANCE} == {}
    assert any(".experts.w1" in name for name in actual)
