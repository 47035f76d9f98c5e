"""LoRA: every layout against one process in float64, what is frozen, checkpoints of adapters, merge and export."""

from typing import Any

from tests.helpers.cases import Case, cases
from tests.parallel.test_layouts import (
    BIASES_AND_NORMS,
    CHUNKED_LOSS,
    COMPILED,
    CP,
    DOCUMENTS,
    EVERY_2_LAYERS,
    EVERY_SECOND_MM,
    FULL,
    MODEL,
    OFFLOAD,
    ONE_ACCUMULATION_STEP,
    PP,
    PREFETCH,
    REPLICATE,
    SELECTIVE,
    SHARD,
    TIED,
    TP,
    ULYSSES,
    USP,
    by_ranks,
    schedule,
    with_batches,
    world_size,
)
from tests.parallel.test_layouts import TOLERANCE as LAYOUT_TOLERANCE
from tests.parallel.test_parity import STEPS, ZERO_1, ZERO_2, compare

RANK = 3
"""No degree divides it, and it is less than the number of ranks that some layouts have."""
LORA = {"lora__rank": RANK, "lora__alpha": 12.0}
BFLOAT16_BASE = {"lora__base_dtype": "bfloat16"}
SOME = {"lora__targets": '["wq", "wo", "feed_forward.w2"]'}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": Case({}, always=True),
    "one rank, reduced once": {"fsdp_reduce_gradients": "last_accumulation_step"},
    "shard 2": Case(SHARD, always=True),
    "shard 4": {"data_parallel_shard_degree": 4},
    "ZeRO-1": SHARD | ZERO_1,
    "ZeRO-2": SHARD | ZERO_2,
    "replicate 2": REPLICATE,
    "HSDP": REPLICATE | SHARD,
    "tp 2": Case(TP, always=True),
    "tp 4": {"tensor_parallel_degree": 4},
    "tp 2, some targets": TP | SOME,
    "tp 2, no loss parallel": TP | {"disable_loss_parallel": True},
    "tp 2, tied embeddings": TP | TIED,
    "tp 2, biases and norms": TP | BIASES_AND_NORMS,
    "shard x tp": Case(SHARD | TP, always=True),
    "HSDP x tp": REPLICATE | SHARD | TP,
    "pp 2": Case(PP, always=True),
    "pp 4": PP | {"pipeline_parallel_degree": 4, "model__n_layers": 5, "training__local_batch_size": 4},
    "GPipe": schedule("GPipe"),
    "Interleaved1F1B": schedule("Interleaved1F1B"),
    "LoopedBFS": schedule("LoopedBFS"),
    "InterleavedZeroBubble": schedule("InterleavedZeroBubble"),
    "ZBVZeroBubble": schedule("ZBVZeroBubble"),
    "DualPipeV x shard": schedule("DualPipeV") | SHARD | ONE_ACCUMULATION_STEP,
    "pp x tp": PP | TP,
    "pp x shard x tp": PP | SHARD | TP,
    "cp 2": Case(CP, always=True),
    "cp x tp": CP | TP,
    "pp x cp": PP | CP,
    "ulysses 2": ULYSSES,
    "ring 2 x ulysses 2": USP,
    "document mask, cp 2": DOCUMENTS | CP,
    "full AC, shard x tp": FULL | SHARD | TP,
    "selective AC, shard x tp": SELECTIVE | SHARD | TP,
    "every second mm, shard": EVERY_SECOND_MM | SHARD,
    "AC every 2 layers, pp": EVERY_2_LAYERS | PP,
    "compiled, shard": COMPILED | SHARD,
    "compiled, tp": COMPILED | TP,
    "compiled, full AC, shard x tp": COMPILED | FULL | SHARD | TP,
    "compiled, pp": COMPILED | PP,
    "chunked cross-entropy, shard": CHUNKED_LOSS | SHARD,
    "chunked cross-entropy, pp x tp": CHUNKED_LOSS | PP | TP,
    "CPU offload, shard": OFFLOAD | SHARD,
    "prefetch, shard": PREFETCH | SHARD,
    "bfloat16 base, one rank": Case(BFLOAT16_BASE, always=True),
    "bfloat16 base, shard x tp": BFLOAT16_BASE | SHARD | TP,
    "bfloat16 base, pp x cp": BFLOAT16_BASE | PP | CP,
    "bfloat16 base, tied embeddings, tp": BFLOAT16_BASE | TIED | TP,
    "float32 base, shard": {"lora__base_dtype": "float32"} | SHARD,
}  # fmt: skip


def n_adapters(options: dict[str, Any]) -> int:
    """Return the number of adapted layers of a config of the table."""
    return (MODEL | options)["model__n_layers"] * (3 if "lora__targets" in options else 7)


@cases("name", by_ranks(LAYOUTS))
def test_layout_matches_reference(ranks: Any, tmp_path: Any, name: str):
    layout = LORA | LAYOUTS[name]
    actual = compare(ranks, tmp_path, world_size(layout), with_batches(layout))
    assert {name: d for name, d in actual.items() if d > LAYOUT_TOLERANCE} == {}
    assert all(d == 0 for name, d in actual.items() if name.startswith("initial weight")), "not bit for bit"
    of_step = [each for each in actual if each.startswith("step 2 gradient")]
    assert len(of_step) == 2 * n_adapters(layout)
    assert all(each.endswith((".lora_a", ".lora_b")) for each in of_step)
    n_weights = sum(each.startswith("final weight") for each in actual)
    assert len(actual) == 2 * n_weights + STEPS * (len(of_step) + 3) + 1
