"""The table of layouts: pipeline x replicate x shard x context x tensor in every combination, with every schedule, each
against one process: loss, norm, every gradient, every weight after three steps in float64 to 1e-11; initial weights bit
for bit; the validation loss."""

import itertools
import shutil
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel

from tests.test_parity import CPU, STEPS, ZERO_1, ZERO_2, CountCalls, compare, forward_backward, resolve, trace
from titanlite import build, config, data, loss, optimizer, parity
from titanlite.checkpoint import Checkpointer
from titanlite.config.stage_split import SPLIT_BACKWARD, V_SHAPED
from titanlite.parallel import fsdp, pipeline, tensor
from titanlite.parity.process_pool import RankError

TOLERANCE = parity.ALLOWED_IN_FLOAT64
SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
SIMPLEST = ("GPipe", "LoopedBFS")

# Four key heads are as many as the largest tensor-parallel degree; three layers do not split_into_stages evenly to two stages.
MODEL = {"model__n_heads": 8, "model__n_kv_heads": 4, "model__n_layers": 2, "training__local_batch_size": 4}
PP = {"pipeline_parallel_degree": 2, "model__n_layers": 3, "training__local_batch_size": 2}
REPLICATE = {"data_parallel_replicate_degree": 2}
SHARD = {"data_parallel_shard_degree": 2}
CP = {"context_parallel_degree": 2}
TP = {"tensor_parallel_degree": 2}
ULYSSES = CP | {"context_parallel_ulysses_degree": 2}
USP = {"context_parallel_degree": 4, "context_parallel_ulysses_degree": 2}
DOCUMENTS = {"training__document_mask": True}
OFFLOAD = {"training__enable_cpu_offload": True}
TIED = {"model__tie_embeddings": True}
COMPILED = {"compile__enable": True, "compile__backend": "aot_eager"}
FULL = {"activation_checkpoint__mode": "full"}
SELECTIVE = {"activation_checkpoint__mode": "selective"}
BUDGET = COMPILED | {"activation_checkpoint__mode": "memory_budget"}
EVERY_SECOND = SELECTIVE | {"activation_checkpoint__selective_ac_option": 2}
LOSS_IN_PARTS = {"training__loss_chunks": 3}
PREFETCH = {"fsdp_forward_prefetch": 2, "fsdp_backward_prefetch": 2}
ONE_MICROSTEP = {"microsteps": 1}
AXES = {"pp": PP, "replicate": REPLICATE, "shard": SHARD, "cp": CP, "tp": TP}


def schedule(name: str, **others: Any) -> dict[str, Any]:
    """A pipeline of two ranks whose stages have a layer each, or more."""
    four = {"model__n_layers": 5, "training__local_batch_size": 4}
    return PP | four | {"pipeline_parallel_schedule": name} | others


def product(*names: str) -> dict[str, Any]:
    return {key: value for name in names for key, value in AXES[name].items()}


LAYOUTS: dict[str, dict[str, Any]] = {
    # One axis
    **{f"{name} 2": layout for name, layout in AXES.items()},
    **{f"{name} 4": {k: 4 if k.endswith("degree") else v for k, v in layout.items()} for name, layout in AXES.items()},
    "pp 4": PP | {"pipeline_parallel_degree": 4, "model__n_layers": 5, "training__local_batch_size": 4},
    # Two and three axes; replicas with two more are nightly
    **{" x ".join(names): product(*names) for names in itertools.combinations(AXES, 2)},
    **{" x ".join(names): product(*names) for names in itertools.combinations(AXES, 3) if "replicate" not in names},
    # Pipelines: each schedule alone at 2 and 4 ranks, and with each of the others, of which the simplest are nightly
    **{f"{name} {degree}": schedule(name, pipeline_parallel_degree=degree, training__local_batch_size=8,
                                    model__n_layers=9, microsteps=4 // degree)
       for name in SCHEDULES for degree in (2, 4)},
    **{f"{name} x {other}": schedule(name) | AXES[other] | ONE_MICROSTEP for name in SCHEDULES
       for other in ("shard", "cp", "tp") if name not in SIMPLEST},
    "GPipe, one microbatch": schedule("GPipe", pipeline_parallel_microbatch_size=4),
    "GPipe, reshard always": schedule("GPipe", fsdp_reshard_after_forward="always") | SHARD,
    "1F1B, reshard always": schedule("1F1B", fsdp_reshard_after_forward="always") | SHARD,
    "Interleaved1F1B, reshard always": schedule("Interleaved1F1B", fsdp_reshard_after_forward="always") | SHARD,
    "LoopedBFS, reshard always": schedule("LoopedBFS", fsdp_reshard_after_forward="always") | SHARD,
    "Interleaved1F1B, three stages a rank": schedule("Interleaved1F1B", pipeline_parallel_stages_per_rank=3,
                                                     model__n_layers=7),
    "pp, balanced by parameters": PP | {"pipeline_parallel_balance": "parameters", "model__vocab_size": 600},
    "pp, stages by name": PP | {"module_fqns_per_model_part": '[["tok_embeddings", "layers.0"], ["layers.1", '
                                '"layers.2", "norm", "output"]]'},
    "pp, CPU offload": PP | OFFLOAD,
    "ZBVZeroBubble, CPU offload": schedule("ZBVZeroBubble") | OFFLOAD,
    # Tensor parallel
    "tp, logits gathered": TP | {"disable_loss_parallel": True},
    "pp x tp, logits gathered": PP | TP | {"disable_loss_parallel": True},
    "tp, tied embeddings": TP | TIED,
    "shard x tp, tied embeddings": SHARD | TP | TIED,
    "tp, CPU offload": TP | OFFLOAD,
    "tp, one key head a head": TP | {"model__n_kv_heads": 8},
    "tp, ZeRO-1": SHARD | TP | ZERO_1,
    "tp, ZeRO-2": SHARD | TP | ZERO_2,
    # Context parallel
    "ulysses 2": ULYSSES,
    "ulysses 4": {"context_parallel_degree": 4, "context_parallel_ulysses_degree": 4},
    "ring 2 x ulysses 2": USP,
    "ulysses x tp": ULYSSES | TP,
    "pp x ulysses": PP | ULYSSES,
    "cp, math kernel": CP | {"training__attention_backend": "math"},
    "shard, cpu kernel": SHARD | {"training__attention_backend": "cpu"},
    "tp, math kernel": TP | {"training__attention_backend": "math"},
    "cp, one key head a head": CP | {"model__n_kv_heads": 8},
    "cp, tied embeddings": CP | TIED,
    "cp, CPU offload": CP | OFFLOAD,
    "cp, ZeRO-1": CP | ZERO_1,
    "cp, ZeRO-2": CP | ZERO_2,
    "HSDP, reshard to groups of 2": REPLICATE | {"data_parallel_shard_degree": 4, "fsdp_reshard_after_forward": 2},
    "cp 4, reshard to groups of 2": {"context_parallel_degree": 4, "fsdp_reshard_after_forward": 2},
    # Documents
    "documents": DOCUMENTS,
    "documents, tp": DOCUMENTS | TP,
    "documents, cp 2": DOCUMENTS | CP,
    "documents, cp 4": DOCUMENTS | {"context_parallel_degree": 4},
    "documents, ulysses 2": DOCUMENTS | ULYSSES,
    "documents, ring 2 x ulysses 2": DOCUMENTS | USP,
    "documents, pp": DOCUMENTS | PP,
    "documents, cp x tp": DOCUMENTS | CP | TP,
    # Recomputed activations
    **{f"{mode} recomputation, {name}": {"activation_checkpoint__mode": mode} | AXES[name]
       for mode in ("full", "selective") for name in ("pp", "shard", "cp", "tp")},
    "every second block recomputed, tp": EVERY_SECOND | TP,
    "every second block recomputed, pp": EVERY_SECOND | PP,
    "full recomputation, ulysses, documents": FULL | ULYSSES | DOCUMENTS,
    "selective recomputation, ulysses, documents": SELECTIVE | ULYSSES | DOCUMENTS,
    "full recomputation, ZBVZeroBubble": FULL | schedule("ZBVZeroBubble"),
    "every second block recomputed, DualPipeV": EVERY_SECOND | schedule("DualPipeV"),
    # The loss in parts
    **{f"loss in 3 parts, {name}": LOSS_IN_PARTS | AXES[name] for name in ("pp", "shard", "cp", "tp")},
    "loss in 3 parts, tp, logits gathered": LOSS_IN_PARTS | TP | {"disable_loss_parallel": True},
    "loss in 3 parts, shard, tied embeddings": LOSS_IN_PARTS | SHARD | TIED,
    "loss in 3 parts, InterleavedZeroBubble": LOSS_IN_PARTS | schedule("InterleavedZeroBubble"),
    # Explicit prefetch
    "prefetch 2, shard": PREFETCH | SHARD,
    "prefetch 2, pp": PREFETCH | PP,
    "prefetch 2, cp x tp": PREFETCH | CP | TP,
    # Compiled, a block at a time
    "compiled, full recomputation, tp": COMPILED | FULL | TP,
    "compiled, selective recomputation, cp": COMPILED | SELECTIVE | CP,
    "compiled, memory budget, tp": BUDGET | TP,
    "compiled, shard": COMPILED | SHARD,
    "compiled, tp": COMPILED | TP,
    "only the loss compiled, tp, logits gathered":
        COMPILED | TP | {"compile__components": '["loss"]', "disable_loss_parallel": True},
    "compiled, cp": COMPILED | CP,
    "compiled, ulysses, documents": COMPILED | ULYSSES | DOCUMENTS,
    "compiled, pp": COMPILED | PP,
    "compiled, Interleaved1F1B": COMPILED | schedule("Interleaved1F1B"),
}  # fmt: skip
# What rounds, each against one process that rounds alike: scales of float8 belong to a rank's tokens and channels,
# blocks of 8-bit moments to its shard. All sides of weights are multiples of 16 on two ranks.
WIDE = {"model__dim": 64, "model__ffn_dim": 96, "model__n_kv_heads": 8, "optimizer__lr": 1e-4}
FLOAT8 = WIDE | {"float8__enable": True, "float8__emulate": True}
GATHERED = {"float8__enable_fsdp_float8_all_gather": True, "float8__precompute_float8_dynamic_scale_for_fsdp": True}
IN_FLOAT32 = WIDE | {"training__dtype": "float32"}
INT8 = IN_FLOAT32 | {"optimizer__state_dtype": "int8", "model__dim": 128}  # fewer than 4096 elements are left alone
HALF = IN_FLOAT32 | {"training__mixed_precision_param": "float16"}
STOCHASTIC = WIDE | {"training__dtype": "bfloat16", "optimizer__stochastic_rounding": True}
PLAIN = {
    "float8__enable": False,
    "optimizer__state_dtype": "auto",
    "optimizer__stochastic_rounding": False,
    "training__mixed_precision_param": "float32",
}
ROUNDING: dict[str, dict[str, Any]] = {
    **{f"float8 {recipe}, {name}": FLOAT8 | {"float8__recipe": recipe} | AXES[name]
       for recipe in ("tensorwise", "rowwise", "rowwise_with_gw_hp") for name in ("pp", "shard", "cp", "tp")},
    "float8 gathered, shard": FLOAT8 | GATHERED | SHARD,
    "float8 gathered, shard x tp": FLOAT8 | GATHERED | SHARD | TP,
    "float8 gathered, pp x shard": FLOAT8 | GATHERED | PP | SHARD,
    "float8, cp x tp": FLOAT8 | CP | TP,
    "float8, selective recomputation, shard x tp": FLOAT8 | SELECTIVE | SHARD | TP,
    "float8, compiled, tp": FLOAT8 | COMPILED | TP,
    "float8, ZBVZeroBubble": FLOAT8 | schedule("ZBVZeroBubble"),
    **{f"int8 moments, {name}": INT8 | AXES[name] for name in ("pp", "shard", "cp", "tp")},
    "int8 moments, CPU offload": INT8 | SHARD | OFFLOAD,
    "bfloat16 moments, shard x tp": IN_FLOAT32 | {"optimizer__state_dtype": "bfloat16"} | SHARD | TP,
    "stochastic rounding, shard x tp": STOCHASTIC | SHARD | TP,
    "stochastic rounding, float32 moments, shard x tp":
        STOCHASTIC | {"optimizer__state_dtype": "float32"} | SHARD | TP,
    "stochastic rounding, int8 moments, pp x shard": INT8 | STOCHASTIC | {"model__dim": 128} | PP | SHARD,
    **{f"float16, {name}": HALF | AXES[name] for name in ("pp", "shard", "cp", "tp")},
    "float16, loss in 3 parts, shard x tp": HALF | LOSS_IN_PARTS | SHARD | TP,
}  # fmt: skip
ROUNDING_NIGHTLY: dict[str, dict[str, Any]] = {
    "float8, shard x cp x tp": FLOAT8 | SHARD | CP | TP,
    "float8, compiled, shard x tp": FLOAT8 | COMPILED | SHARD | TP,
}
NIGHTLY = {
    **{" x ".join(names): product(*names) for names in itertools.combinations(AXES, 3) if "replicate" in names},
    **{f"{name} x {other}": schedule(name) | AXES[other] | ONE_MICROSTEP for name in SIMPLEST
       for other in ("shard", "cp", "tp")},
    **{" x ".join(names): product(*names) for names in itertools.combinations(AXES, 4)},
    "all five axes": product(*AXES),
    "all five axes, ZBVZeroBubble, documents": product(*AXES) | schedule("ZBVZeroBubble") | DOCUMENTS,
    "pp x ring x ulysses x tp": PP | USP | TP,
    "compiled, pp x cp x tp": COMPILED | PP | CP | TP,
    "full recomputation, pp x cp x tp": FULL | PP | CP | TP,
    "selective recomputation, pp x cp x tp": SELECTIVE | PP | CP | TP,
    "compiled, full recomputation, cp x tp": COMPILED | FULL | CP | TP,
    "compiled, selective recomputation, cp x tp": COMPILED | SELECTIVE | CP | TP,
    **{f"compiled, {mode} recomputation, {name}": COMPILED | {"activation_checkpoint__mode": mode} | AXES[name]
       for mode in ("full", "selective") for name in ("pp", "shard")},
    **{f"compiled, memory budget, {name}": BUDGET | product(*name.split(" x "))
       for name in ("pp", "shard x tp", "cp x tp")},
    "compiled, memory budget of nothing, shard": BUDGET | SHARD | {"activation_checkpoint__memory_budget": 0.0},
    "compiled, tp, logits gathered": COMPILED | TP | {"disable_loss_parallel": True},
    "loss in 3 parts, compiled, tp": LOSS_IN_PARTS | COMPILED | TP,
    "loss in 3 parts, InterleavedZeroBubble x tp": LOSS_IN_PARTS | schedule("InterleavedZeroBubble") | TP,
    "documents, pp x cp x tp": DOCUMENTS | PP | CP | TP,
}  # fmt: skip


def world_size(layout: dict[str, Any]) -> int:
    """How many ranks a layout has."""
    return int(np.prod([value for key, value in layout.items() if key.endswith("_degree") and "ulysses" not in key]))


def with_batches(layout: dict[str, Any]) -> dict[str, Any]:
    """A layout's options, with two microsteps unless it says otherwise."""
    options = MODEL | layout
    order = options.get("pipeline_parallel_schedule")
    if order in V_SHAPED and torch.__version__ < "2.12":
        pytest.skip("refused on a CPU with torch 2.11")
    functions = {"float8__enable", "training__loss_chunks"} & set(options)
    budget = options.get("activation_checkpoint__mode") == "memory_budget" and "tensor_parallel_degree" in options
    in_halves = functions and order in SPLIT_BACKWARD
    if (budget and torch.__version__.startswith("2.12.")) or (in_halves and torch.__version__ < "2.13"):
        pytest.skip("refused with this torch")
    data_ranks = options.get("data_parallel_replicate_degree", 1) * options.get("data_parallel_shard_degree", 1)
    microsteps = options.pop("microsteps", 2)
    options["training__global_batch_size"] = options["training__local_batch_size"] * data_ranks * microsteps
    return options


def assert_equal(ranks: Any, tmp_path: Any, layout: dict[str, Any]) -> None:
    options = with_batches(layout)
    found = compare(ranks, tmp_path, world_size(layout), options)
    assert {what: d for what, d in found.items() if d > TOLERANCE} == {}
    assert all(d == 0 for what, d in found.items() if what.startswith("initial weight")), "not bit for bit"
    n_parameters = len([what for what in found if what.startswith("initial weight")])
    assert n_parameters == 2 + options["model__n_layers"] * 9 + (not options.get("model__tie_embeddings"))
    assert len(found) == n_parameters * (STEPS + 2) + 2 * STEPS + 1


@pytest.mark.parametrize("name", LAYOUTS)
def test_equals_one_process(ranks, tmp_path, name):
    assert_equal(ranks, tmp_path, LAYOUTS[name])


def largest(differences: dict[str, float]) -> float:
    """Of the final weights."""
    return max(difference for what, difference in differences.items() if what.startswith("final weight"))


@pytest.fixture(scope="module")
def by_one_process() -> Any:
    """A trace, what may differ from it, and a trace without the options that round, of a job; computed once for all
    rows that differ in their layout only."""
    found: dict[str, Any] = {}

    def compute(job: config.Config) -> tuple[parity.Trace, dict[str, float], parity.Trace]:
        key = "".join(part.model_dump_json() for part in (job.model, job.training, job.optimizer, job.float8))
        if key not in found:
            alone = parity.run_alone(job, CPU, steps=STEPS)
            bounds = parity.allowed(job, alone, CPU, steps=STEPS)
            found[key] = alone, bounds, parity.run_alone(job.replace(**PLAIN), CPU, steps=STEPS)
        return found[key]

    return compute


@pytest.mark.parametrize(
    "name", [*ROUNDING, *(pytest.param(name, marks=pytest.mark.nightly) for name in ROUNDING_NIGHTLY)]
)
def test_rounds_as_one_process_does(ranks, by_one_process, tmp_path, name):
    """No farther from it than a few times what rounding alone does to it; and as far as it from one that does not
    round so, or the layout has ignored the option."""
    options = (ROUNDING | ROUNDING_NIGHTLY)[name]
    n = world_size(options)
    job = resolve(tmp_path, n, with_batches(options | ONE_MICROSTEP))
    alone, bounds, plain = by_one_process(job)
    layout, *_ = ranks(n).run(trace, job=job)
    found = parity.differences(alone, layout)
    wrong = {what: (d, bounds[what]) for what, d in found.items() if d > bounds[what]}
    assert wrong == {}
    by_option = largest(parity.differences(plain, alone))
    assert 0.2 * by_option < largest(parity.differences(plain, layout)) < 5 * by_option


@pytest.mark.nightly
@pytest.mark.parametrize("name", NIGHTLY)
def test_large_layout_equals_one_process(ranks, tmp_path, name):
    assert_equal(ranks, tmp_path, NIGHTLY[name])


@pytest.mark.parametrize("layout", [CP, ULYSSES, PP, TP], ids=["ring", "ulysses", "pp", "tp"])
def test_one_microstep(ranks, tmp_path, layout):
    assert_equal(ranks, tmp_path, layout | ONE_MICROSTEP)


def first_tokens_only(rank: int = 0) -> Any:
    """Sequences of which only the first two tokens have a target, so that of a ring only rank 0 has any."""
    real = parity.ProofSequences.__getitem__

    def only_first(self: parity.ProofSequences, index: int) -> Any:
        sequence = real(self, index)
        sequence.targets[:2] = sequence.inputs[1:3]
        sequence.targets[2:] = -100
        return sequence

    return mock.patch.object(parity.ProofSequences, "__getitem__", only_first)


@pytest.mark.parametrize("layout", [{"context_parallel_degree": 4}, USP], ids=["ring 4", "ring 2 x ulysses 2"])
def test_a_rank_without_a_valid_target(ranks, tmp_path, layout):
    job = resolve(tmp_path, 4, MODEL | layout)
    (found, *_) = ranks(4).run(trace, job=job, broken=first_tokens_only)
    with first_tokens_only():
        alone = parity.run_alone(job, CPU, steps=STEPS)
    assert {what: d for what, d in parity.differences(found, alone).items() if d > TOLERANCE} == {}


# Broken on purpose ---------------------------------------------------------------------------------------------------


def _parts_of_the_vocabulary_taken_for_all(rank: int) -> Any:
    real = loss.cross_entropy_sum
    return mock.patch.object(loss, "cross_entropy_sum", lambda logits, targets, group: real(logits, targets % 30))


def _norm_left_out_of_the_plan(rank: int) -> Any:
    """The sequence reaches it cut, and each rank keeps the gradient of its piece."""
    return mock.patch.dict(tensor.BLOCK, {"ffn_norm": tensor.PrepareModuleInput()})


def _rows_for_columns(rank: int) -> Any:
    return mock.patch.dict(tensor.BLOCK, {"feed_forward.w2": ColwiseParallel()})


def _zig_zag_off_by_one(rank: int) -> Any:
    real = build.local_positions

    def off(seq_len: int, *, ring: int, ulysses: int, rank: int) -> torch.Tensor:
        return real(seq_len, ring=ring, ulysses=ulysses, rank=rank).roll(1)

    return mock.patch.object(build, "local_positions", off)


def _no_sum_over_context(rank: int) -> Any:
    """Each rank keeps its own weights and gradients, as if its piece of a sequence were a sequence of its own."""
    alone = init_device_mesh("cpu", (2, 1), mesh_dim_names=("all", "alone"))["alone"]
    real = fsdp.fully_shard
    return mock.patch.object(fsdp, "fully_shard", lambda m, mesh, **others: real(m, mesh=alone, **others))


def _gradients_scaled_by_microbatches(rank: int) -> Any:
    real = pipeline.get_schedule_class

    def scaling(name: str) -> Any:
        kind = real(name)
        make = kind.__init__
        return type(name, (kind,), {"__init__": lambda s, *a, **k: make(s, *a, **k | {"scale_grads": True})})

    return mock.patch.object(pipeline, "get_schedule_class", scaling)


def _copies_counted_each(rank: int) -> Any:
    return mock.patch.object(optimizer, "n_replicas", return_value=1)


def _positions_not_offset(rank: int) -> Any:
    real = data.loader.collate

    def local(*arguments: Any, **options: Any) -> data.Batch:
        batch = real(*arguments, **options)
        return batch._replace(positions=torch.arange(batch.tokens.shape[1]).expand_as(batch.tokens).contiguous())

    return mock.patch.object(data.loader, "collate", local)


def _documents_ignored(rank: int) -> Any:
    real = data.loader.collate

    def without_document_positions(*arguments: Any, **options: Any) -> data.Batch:
        return real(*arguments, **options)._replace(document_positions=None)

    return mock.patch.object(data.loader, "collate", without_document_positions)


CP_DOCUMENTS = CP | DOCUMENTS


@pytest.mark.parametrize(
    ("broken", "layout", "first"),
    [
        (_parts_of_the_vocabulary_taken_for_all, TP, "step 1 loss"),
        (_norm_left_out_of_the_plan, TP, "step 1 norm"),
        (_zig_zag_off_by_one, CP, "step 1 loss"),
        (_no_sum_over_context, CP, "step 1 norm"),
        (_gradients_scaled_by_microbatches, PP, "step 1 norm"),
        (_gradients_scaled_by_microbatches, schedule("InterleavedZeroBubble"), "step 1 norm"),
        (_copies_counted_each, TP, "step 1 norm"),
        (_positions_not_offset, CP, "step 1 loss"),
        (_positions_not_offset, ULYSSES, "step 1 loss"),
        (_documents_ignored, CP_DOCUMENTS, "step 1 loss"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_broken_on_purpose_goes_red(ranks, tmp_path, broken, layout, first):
    found = compare(ranks, tmp_path, 2, MODEL | layout, broken)
    assert next(what for what, d in found.items() if d > 10 * TOLERANCE) == first


def test_a_plan_that_does_not_fit_raises(ranks, tmp_path):
    with pytest.raises(RankError, match="reduction dim"):
        compare(ranks, tmp_path, 2, MODEL | TP, _rows_for_columns)


def computed(job: config.Config) -> tuple[int, int, int]:
    """How many matrix products, attentions and SwiGLU's silus a step's forward and backward compute."""
    counted = CountCalls("aten")
    forward_backward(job, counted)
    attention = "_scaled_dot_product_flash_attention_for_cpu"
    return counted.calls["mm"], counted.calls[attention], counted.calls["silu"]


@pytest.mark.parametrize(
    ("options", "products", "attentions", "silus"),
    [({}, 0, 0, 0), (FULL, 6, 1, 1), (SELECTIVE, 0, 0, 1), (EVERY_SECOND, 3, 0.5, 0.5)],
    ids=["none", "full", "selective", "every second"],
)
def test_what_is_computed_again(ranks, tmp_path, options, products, attentions, silus):
    """In a block, beside 7 products and their 14 gradients. The last product is needed for no gradient, so it is not
    computed again in full recomputation, which ends with what the backward asks for."""
    layers = 4
    job = resolve(tmp_path, 1, MODEL | options | {"model__n_layers": layers})
    (found,) = ranks(1).run(computed, job=job)
    once = layers * 21 + 3, layers, layers
    assert found == tuple(n + layers * more for n, more in zip(once, (products, attentions, silus), strict=True))


def prefetched(job: config.Config) -> list[tuple[int, int]]:
    """How many units each block has gathered ahead of it, forward and backward (private to FSDP, as of 2.13)."""
    model, _ = build.build_model(job, build.build_layout(job, CPU), CPU)
    states = [block._get_fsdp_state() for block in model.layers.values()]
    return [(len(s._states_to_forward_prefetch), len(s._states_to_backward_prefetch)) for s in states]


def test_prefetch_reaches_fsdp(ranks, tmp_path):
    options = {"fsdp_forward_prefetch": 2, "fsdp_backward_prefetch": 1, "model__n_layers": 4}
    assert ranks(1).run(prefetched, job=resolve(tmp_path, 1, options)) == [[(2, 0), (2, 1), (1, 1), (0, 1)]]


def graphs(job: config.Config) -> int:
    """How many graphs dynamo makes of a step."""
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    parity.run(job, config.Launch.from_environment(n_devices=0), steps=1)
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.parametrize(
    "options", [{}, FULL, SELECTIVE, LOSS_IN_PARTS], ids=["", "full", "selective", "loss in parts"]
)
def test_blocks_that_are_alike_are_compiled_once(ranks, tmp_path, options):
    counts = []
    for n_layers in (2, 5):
        job = resolve(tmp_path, 1, MODEL | COMPILED | options | {"model__n_layers": n_layers})
        counts += ranks(1).run(graphs, job=job)
    assert counts[0] == counts[1] > 0


def test_only_the_named_components_are_compiled(ranks, tmp_path):
    counts = []
    for named in '["model"]', '["loss"]', '["model", "loss"]':
        job = resolve(tmp_path, 1, MODEL | COMPILED | {"compile__components": named})
        counts += ranks(1).run(graphs, job=job)
    of_blocks, of_loss, of_both = counts
    assert of_blocks > 0
    assert of_loss > 0
    assert of_both == of_blocks + of_loss


def kept(job: config.Config) -> int:
    """How many elements a step's forward keeps for its backward."""
    torch.compiler.reset()
    elements = 0

    def count(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal elements
        elements += tensor.numel()
        return tensor

    forward_backward(job, torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor))
    return elements


def test_a_larger_memory_budget_keeps_more(ranks, tmp_path):
    found = []
    for share in 0.0, 0.5, 1.0:
        job = resolve(tmp_path, 1, MODEL | BUDGET | {"activation_checkpoint__memory_budget": share})
        found += ranks(1).run(kept, job=job)
    nothing, half, all_of_it = found
    assert nothing < half < all_of_it


# The plan and the traffic --------------------------------------------------------------------------------------------


def test_the_plan_covers_every_parameter_of_a_block():
    """By the module that holds it: one that the plan forgot would be a plain tensor, whole on each rank."""
    job = config.Config()
    (block, *_) = build.meta_model(job).layers.values()
    holders = {name.rpartition(".")[0] for name, _ in block.named_parameters()}
    assert holders <= set(tensor.BLOCK)
    assert set(tensor.BLOCK) - holders == {"attention", "feed_forward"}, "the other entries gather the sequence"
    ends = {name for name, _ in build.meta_model(job).named_children()} - {"layers"}
    assert ends == set(tensor.ENDS)


def held(job: config.Config) -> dict[str, float]:
    """What share of each parameter's elements this rank has."""
    layout = build.build_layout(job, CPU)
    model, _ = build.build_model(job, layout, CPU)
    return {name: p.to_local().numel() / p.numel() for name, p in model.named_parameters()}


def test_each_rank_holds_its_share_of_every_matrix(ranks, tmp_path):
    for shares in ranks(4).run(held, job=resolve(tmp_path, 4, MODEL | TP | SHARD)):
        assert {share for name, share in shares.items() if "norm" not in name} == {1 / 4}
        assert {share for name, share in shares.items() if "norm" in name} == {1 / 2}, "norms are whole over tp"


# Resume under another layout -----------------------------------------------------------------------------------------

FROM = PP | SHARD | CP
TO = {
    "one process": {},
    "tp 4": {"tensor_parallel_degree": 4},
    "pp x tp, zero-bubble": schedule("InterleavedZeroBubble") | TP,
    "HSDP x cp": REPLICATE | SHARD | CP,
    "shard x ulysses x tp": SHARD | ULYSSES | TP,
}


def trace_with_checkpoint(job: config.Config, folder: Any, steps: int) -> parity.Trace | None:
    """Go on from what is in a folder for some steps, and save."""
    launch = config.Launch.from_environment(n_devices=0)
    checkpointer = Checkpointer(folder, config.schema.Checkpoint(folder=".", keep_latest_k=0), identity={})
    found = parity.run(job, launch, steps=steps, checkpointer=checkpointer)
    checkpointer.close()
    return found if launch.rank == 0 else None


def two_steps(ranks: Any, tmp_path: Any, layout: dict[str, Any], folder: Any) -> tuple[config.Config, parity.Trace]:
    """Two more steps from what is in the folder, saved there again."""
    n = world_size(layout)
    same = {"model__n_layers": 4, "training__local_batch_size": 2, "training__global_batch_size": 8}
    job = resolve(tmp_path, n, MODEL | layout | same)
    found, *_ = ranks(n).run(trace_with_checkpoint, job=job, folder=folder, steps=2)
    return job, found


@pytest.fixture(scope="module")
def saved(ranks: Any, tmp_path_factory: Any) -> tuple[Any, parity.Trace]:
    """A checkpoint after two steps, and their trace."""
    folder = tmp_path_factory.mktemp("saved")
    return folder / "checkpoint", two_steps(ranks, folder, FROM, folder / "checkpoint")[1]


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.nightly] * (name == "tp 4")) for name in TO])
def test_resume_under_another_layout(ranks, saved, tmp_path, name):
    """Two steps under one layout, two under another, as four in one process."""
    checkpoint, before = saved
    shutil.copytree(checkpoint, tmp_path / "checkpoint")
    job, after = two_steps(ranks, tmp_path, TO[name], tmp_path / "checkpoint")
    alone = parity.run_alone(job, CPU, steps=4)
    assert before.losses + after.losses == pytest.approx(alone.losses, abs=TOLERANCE)
    assert before.norms + after.norms == pytest.approx(alone.norms, abs=TOLERANCE)
    found = {name: (after.weights[name] - weight).abs().max().item() for name, weight in alone.weights.items()}
    assert {name: difference for name, difference in found.items() if difference > TOLERANCE} == {}


@pytest.mark.parametrize("moments", ["int8", pytest.param("bfloat16", marks=pytest.mark.nightly)])
def test_low_bit_moments_resume_under_another_layout(ranks, tmp_path, moments):
    """Saved as they are on two shards; blocks of 8-bit ones are others on two tensor-parallel ranks."""
    low_bit = INT8 | {"optimizer__state_dtype": moments}
    _, before = two_steps(ranks, tmp_path, low_bit | SHARD, tmp_path / "checkpoint")
    job, after = two_steps(ranks, tmp_path, low_bit | TP, tmp_path / "checkpoint")
    alone = parity.run_alone(job, CPU, steps=4)
    bounds = parity.allowed(job, alone, CPU, steps=4)
    assert before.losses + after.losses == pytest.approx(alone.losses, abs=bounds["step 4 loss"])
    found = {name: (after.weights[name] - weight).abs().max().item() for name, weight in alone.weights.items()}
    assert {name: d for name, d in found.items() if d > bounds[f"final weight {name}"]} == {}
