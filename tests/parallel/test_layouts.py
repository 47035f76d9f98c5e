"""Parity tests of all layouts: pipeline x replicate x shard x context x tensor parallel in every combination, with
every schedule. Each is compared with the single-process reference over three steps in float64: loss, norm, every
gradient, every weight and the validation loss to 1e-11; initial weights bit for bit."""

import itertools
import re
import shutil
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext

from tests.helpers.cases import Case, cases
from tests.parallel.test_parity import CPU, STEPS, ZERO_1, ZERO_2, CountCalls, compare, forward_backward, resolve, trace
from titanlite import build, config, loss, optimizer
from titanlite.checkpoint.checkpointer import Checkpointer
from titanlite.config.stage_split import SPLIT_BACKWARD, V_SHAPED
from titanlite.data import loader
from titanlite.data.loader import Batch
from titanlite.launch.failure import BACKSTOP_SECONDS
from titanlite.launch.process import Signals
from titanlite.launch.process_group import set_timeout
from titanlite.parallel import activation_checkpoint, fsdp, mesh, parallelize, pipeline, tensor, tiles
from titanlite.tools.parity.compare import FLOAT64_TOLERANCE, differences, tolerances
from titanlite.tools.parity.process_pool import RankError
from titanlite.tools.parity.reference import RandomSequences, Trace, run_reference
from titanlite.tools.parity.training_run import TrainingRun, run_layout
from titanlite.train_step import sum_over_ranks

TOLERANCE = FLOAT64_TOLERANCE
SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
SIMPLEST = ("GPipe", "LoopedBFS")

# Four KV heads are as many as the largest tensor-parallel degree. Three layers cannot be split evenly into two stages.
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
BIASES_AND_NORMS = {"model__attention_bias": "all", "model__mlp_bias": True, "model__qk_norm": True}
COMPILED = {"compile__enable": True, "compile__backend": "aot_eager"}
FULL = {"activation_checkpoint__mode": "full"}
SELECTIVE = {"activation_checkpoint__mode": "selective"}
EVERY_2_LAYERS = SELECTIVE | {"activation_checkpoint__selective_ac_option": 2}
SAVED_ATTENTION = SELECTIVE | {"activation_checkpoint__selective_ac_option": "attention"}
EVERY_SECOND_MM = SELECTIVE | {"activation_checkpoint__selective_ac_option": "every_second_mm"}
KINDS = {"model__layer_pattern": "[{count = 1, rope_theta = 100.0}, {count = 1, sliding_window = 5}]"}
SEVEN_LAYERS = {"model__n_layers": 7}
GROUPS_OF_2, GROUPS_OF_3 = (SEVEN_LAYERS | {"activation_checkpoint__layers_per_checkpoint": n} for n in (2, 3))
CHUNKED_LOSS = {"training__loss_chunks": 3}
MUON = {"optimizer__name": "Muon"}
HOST_STATES = {"optimizer__enable_cpu_offload": True}
PREFETCH = {"fsdp_forward_prefetch": 2, "fsdp_backward_prefetch": 2}
ONE_ACCUMULATION_STEP = {"accumulation_steps": 1}
AXES = {"pp": PP, "replicate": REPLICATE, "shard": SHARD, "cp": CP, "tp": TP}


def schedule(name: str, **kwargs: Any) -> dict[str, Any]:
    """Return a pipeline of two ranks whose stages have at least one layer each."""
    four = {"model__n_layers": 5, "training__local_batch_size": 4}
    return PP | four | {"pipeline_parallel_schedule": name} | kwargs


def product(*names: str) -> dict[str, Any]:
    """Return the options of several axes together."""
    return {key: value for name in names for key, value in AXES[name].items()}


LAYOUTS: dict[str, dict[str, Any]] = {
    # One rank, and one axis
    "one rank": Case({}, always=True),
    "one rank, tied embeddings, reduced once": TIED | {"fsdp_reduce_gradients": "last_accumulation_step"},
    **{f"{name} 2": Case(layout, always=layout is TP) for name, layout in AXES.items()},
    **{f"{name} 4": {k: 4 if k.endswith("degree") else v for k, v in layout.items()} for name, layout in AXES.items()},
    "pp 4": PP | {"pipeline_parallel_degree": 4, "model__n_layers": 5, "training__local_batch_size": 4},
    # Two and three axes
    **{" x ".join(names): Case(product(*names), always=names in (("pp", "tp"), ("shard", "cp")))
       for names in itertools.combinations(AXES, 2)},
    **{" x ".join(names): product(*names) for names in itertools.combinations(AXES, 3) if "replicate" not in names},
    # Pipelines: each schedule alone at 2 and 4 ranks, and with each of the other axes
    **{f"{name} {degree}": Case(schedule(name, pipeline_parallel_degree=degree, training__local_batch_size=8,
                                         model__n_layers=9, accumulation_steps=4 // degree),
                                always=(name, degree) == ("Interleaved1F1B", 2))
       for name in SCHEDULES for degree in (2, 4)},
    **{f"{name} x {other}": schedule(name) | AXES[other] | ONE_ACCUMULATION_STEP for name in SCHEDULES
       for other in ("shard", "cp", "tp") if name not in SIMPLEST},
    "GPipe, one microbatch": Case(schedule("GPipe", pipeline_parallel_microbatch_size=4), always=True),
    "GPipe, reshard always": schedule("GPipe", fsdp_reshard_after_forward="always") | SHARD,
    "1F1B, reshard always": schedule("1F1B", fsdp_reshard_after_forward="always") | SHARD,
    "Interleaved1F1B, reshard always": schedule("Interleaved1F1B", fsdp_reshard_after_forward="always") | SHARD,
    "LoopedBFS, reshard always": schedule("LoopedBFS", fsdp_reshard_after_forward="always") | SHARD,
    "Interleaved1F1B, 3 stages per rank": schedule("Interleaved1F1B", pipeline_parallel_stages_per_rank=3,
                                                     model__n_layers=7),
    "pp, balanced by parameters": Case(PP | {"pipeline_parallel_balance": "parameters", "model__vocab_size": 600},
                                       always=True),
    "pp, stages by name": Case(PP | {"module_fqns_per_model_part": '[["tok_embeddings", "layers.0"], ["layers.1", '
                                     '"layers.2", "norm", "output"]]'}, always=True),
    "pp, CPU offload": PP | OFFLOAD,
    "ZBVZeroBubble, CPU offload": schedule("ZBVZeroBubble") | OFFLOAD,
    # Tensor parallel
    "tp, no loss parallel": TP | {"disable_loss_parallel": True},
    "pp x tp, no loss parallel": PP | TP | {"disable_loss_parallel": True},
    "tp, tied embeddings": Case(TP | TIED, always=True),
    "shard x tp, tied embeddings": SHARD | TP | TIED,
    "tp, CPU offload": TP | OFFLOAD,
    "tp, as many KV heads as heads": TP | {"model__n_kv_heads": 8},
    "tp, ZeRO-1": SHARD | TP | ZERO_1,
    "tp, ZeRO-2": SHARD | TP | ZERO_2,
    # Context parallel
    "ulysses 2": Case(ULYSSES, always=True),
    "ulysses 4": {"context_parallel_degree": 4, "context_parallel_ulysses_degree": 4},
    "ring 2 x ulysses 2": Case(USP, always=True),
    "ulysses x tp": ULYSSES | TP,
    "pp x ulysses": PP | ULYSSES,
    "cp, math backend": CP | {"training__attention_backend": "math"},
    "shard, cpu backend": SHARD | {"training__attention_backend": "cpu"},
    "tp, math backend": TP | {"training__attention_backend": "math"},
    "cp, as many KV heads as heads": CP | {"model__n_kv_heads": 8},
    "cp, tied embeddings": CP | TIED,
    "cp, CPU offload": CP | OFFLOAD,
    "cp, ZeRO-1": CP | ZERO_1,
    "cp, ZeRO-2": Case(CP | ZERO_2, always=True),
    "HSDP, reshard to groups of 2": REPLICATE | {"data_parallel_shard_degree": 4, "fsdp_reshard_after_forward": 2},
    "cp 4, reshard to groups of 2": {"context_parallel_degree": 4, "fsdp_reshard_after_forward": 2},
    # Document mask
    "document mask": Case(DOCUMENTS, always=True),
    "document mask, tp": DOCUMENTS | TP,
    "document mask, cp 2": Case(DOCUMENTS | CP, always=True),
    "document mask, ulysses 2": Case(DOCUMENTS | ULYSSES, always=True),
    "document mask, ring 2 x ulysses 2": DOCUMENTS | USP,
    "document mask, pp": DOCUMENTS | PP,
    # Activation checkpointing (AC)
    **{f"{mode} AC, {name}": Case({"activation_checkpoint__mode": mode} | AXES[name],
                                  always=(mode, name) == ("selective", "cp"))
       for mode in ("full", "selective") for name in ("pp", "shard", "cp", "tp")},
    "selective AC, every 2 layers, tp": EVERY_2_LAYERS | TP,
    "selective AC, every 2 layers, pp": Case(EVERY_2_LAYERS | PP, always=True),
    **{f"selective AC, every second mm, {name}": EVERY_SECOND_MM | AXES[name] for name in ("pp", "shard", "cp", "tp")},
    "full AC, ulysses, document mask": FULL | ULYSSES | DOCUMENTS,
    "selective AC, ulysses, document mask": SELECTIVE | ULYSSES | DOCUMENTS,
    "full AC, ZBVZeroBubble": FULL | schedule("ZBVZeroBubble"),
    "selective AC, every 2 layers, DualPipeV": EVERY_2_LAYERS | schedule("DualPipeV"),
    # Activation checkpointing over groups of layers, the last of which is smaller
    **{f"{mode} AC, groups of {n}, {name}": Case(AXES[name] | groups | {"activation_checkpoint__mode": mode},
                                                 always=(n, mode, name) in ((3, "full", "shard"), (2, "none", "pp")))
       for n, groups, mode in ((3, GROUPS_OF_3, "full"), (2, GROUPS_OF_2, "none")) for name in AXES},
    "full AC, groups of 3, one rank": Case(GROUPS_OF_3 | FULL, always=True),
    "full AC, groups of 3, shard 4, reshard to groups of 2":
        GROUPS_OF_3 | FULL | {"data_parallel_shard_degree": 4, "fsdp_reshard_after_forward": 2},
    "full AC, groups of 3, shard, reshard never": GROUPS_OF_3 | FULL | SHARD | ZERO_2,
    "full AC, groups of 3, shard, reduced once": GROUPS_OF_3 | FULL | SHARD | ZERO_1,
    "full AC, groups of 3, shard, prefetch 2": GROUPS_OF_3 | FULL | SHARD | PREFETCH,
    "full AC, groups of 3, shard, CPU offload": GROUPS_OF_3 | FULL | SHARD | OFFLOAD,
    "full AC, groups of 3, HSDP x tp, tied embeddings": GROUPS_OF_3 | FULL | REPLICATE | SHARD | TP | TIED,
    "full AC, groups of 3, ulysses x tp, document mask": GROUPS_OF_3 | FULL | ULYSSES | TP | DOCUMENTS,
    "full AC, groups of 3, Muon, shard x tp": GROUPS_OF_3 | FULL | MUON | SHARD | TP,
    "full AC, groups of 3, all five axes": GROUPS_OF_3 | FULL | product(*AXES),
    "full AC, groups of 3, kinds of layers, cp": GROUPS_OF_3 | FULL | CP | KINDS,
    "full AC, groups of 3, kinds of layers, one rank": Case(GROUPS_OF_3 | FULL | KINDS, always=True),
    "none AC, groups of 2, HSDP": GROUPS_OF_2 | REPLICATE | SHARD,
    "none AC, groups of 2, ring 2 x ulysses 2, document mask": GROUPS_OF_2 | USP | DOCUMENTS,
    **{f"{mode} AC, groups of 2, {name}": schedule(name) | GROUPS_OF_2 | ONE_ACCUMULATION_STEP
            | {"activation_checkpoint__mode": mode, "model__n_layers": 11}
       for name in SCHEDULES for mode in ("full", "none") if name not in SIMPLEST},
    "full AC, groups of 2, GPipe, reshard always x shard":
        schedule("GPipe", fsdp_reshard_after_forward="always") | SHARD | GROUPS_OF_2 | FULL,
    **{f"compiled, {mode} AC, groups of 3, {name}":
            COMPILED | GROUPS_OF_3 | AXES[name] | {"activation_checkpoint__mode": mode}
       for mode in ("full", "none") for name in ("pp", "shard", "cp", "tp")},
    # Chunked cross-entropy
    **{f"chunked cross-entropy, 3 chunks, {name}": CHUNKED_LOSS | AXES[name] for name in ("pp", "shard", "cp")},
    "chunked cross-entropy, 3 chunks, tp": Case(CHUNKED_LOSS | TP, always=True),
    "chunked cross-entropy, 3 chunks, tp, no loss parallel": CHUNKED_LOSS | TP | {"disable_loss_parallel": True},
    "chunked cross-entropy, 3 chunks, shard, tied embeddings": Case(CHUNKED_LOSS | SHARD | TIED, always=True),
    "chunked cross-entropy, 3 chunks, InterleavedZeroBubble": CHUNKED_LOSS | schedule("InterleavedZeroBubble"),
    # Explicit prefetch
    "prefetch 2, shard": Case(PREFETCH | SHARD, always=True),
    "prefetch 2, pp": PREFETCH | PP,
    # Muon. Of the 5 rows of w1 on a tensor-parallel rank, uneven shards have 2, 2, 1 and 0
    "Muon, pp": Case(MUON | PP, always=True),
    **{f"Muon, {name}": MUON | AXES[name] for name in ("replicate", "shard", "cp", "tp")},
    "Muon, shard x tp": MUON | SHARD | TP,
    "Muon, replicate x shard": MUON | REPLICATE | SHARD,
    "Muon, pp x shard": MUON | PP | SHARD,
    "Muon, uneven shards x tp": MUON | TP | {"data_parallel_shard_degree": 4, "model__ffn_dim": 10},
    "Muon, tied embeddings, shard": MUON | TIED | SHARD,
    # Optimizer states in host memory
    "optimizer offload, shard x tp": Case(HOST_STATES | SHARD | TP, always=True),
    "optimizer offload, pp": HOST_STATES | PP,
    "optimizer offload, Adam, uneven shards": HOST_STATES
        | {"data_parallel_shard_degree": 4, "model__ffn_dim": 10, "optimizer__name": "Adam"},
    # Compiled blocks
    "compiled, selective AC, cp": COMPILED | SELECTIVE | CP,
    "compiled, shard": COMPILED | SHARD,
    "compiled, tp": Case(COMPILED | TP, always=True),
    "compiled, pp": COMPILED | PP,
    "compiled, Interleaved1F1B": COMPILED | schedule("Interleaved1F1B"),
}  # fmt: skip
# Low precision, each compared with a reference in the same precision. Scales of float8 belong to a rank's tokens and
# channels, blocks of 8-bit optimizer states to its shard. All sides of weights are multiples of 16 on two ranks.
WIDE = {"model__dim": 64, "model__ffn_dim": 96, "model__n_kv_heads": 8, "optimizer__lr": 1e-4}
FLOAT8 = WIDE | {"float8__enable": True, "float8__emulate": True}
FLOAT8_ALL_GATHER = {
    "float8__enable_fsdp_float8_all_gather": True,
    "float8__precompute_float8_dynamic_scale_for_fsdp": True,
}
# Blocks of 32 on two ranks. Each rank's tokens are in multiples of 32 too, chunks of a ring included.
MXFP8 = FLOAT8 | {"float8__recipe": "mxfp8", "model__ffn_dim": 128, "training__seq_len": 128}
INT8_PRODUCTS = WIDE | {"int8__enable": True}
IN_FLOAT32 = WIDE | {"training__dtype": "float32"}
INT8 = IN_FLOAT32 | {"optimizer__state_dtype": "int8", "model__dim": 128}  # fewer than 4096 elements are left alone
INT4, FLOAT8_STATES = (INT8 | {"optimizer__state_dtype": name} for name in ("int4", "float8"))
HALF = IN_FLOAT32 | {"training__mixed_precision_param": "float16"}
STOCHASTIC = WIDE | {"training__dtype": "bfloat16", "optimizer__stochastic_rounding": True}
FULL_PRECISION = {
    "float8__enable": False,
    "int8__enable": False,
    "optimizer__state_dtype": "auto",
    "optimizer__stochastic_rounding": False,
    "training__mixed_precision_param": "float32",
}
LOW_PRECISION: dict[str, dict[str, Any]] = {
    **{f"float8 rowwise, {name}": FLOAT8 | {"float8__recipe": "rowwise"} | AXES[name]
       for name in ("pp", "shard", "cp", "tp")},
    "float8 tensorwise, shard": FLOAT8 | {"float8__recipe": "tensorwise"} | SHARD,
    "float8 tensorwise, tp": FLOAT8 | {"float8__recipe": "tensorwise"} | TP,
    "float8 rowwise_with_gw_hp, shard": FLOAT8 | {"float8__recipe": "rowwise_with_gw_hp"} | SHARD,
    "float8 all-gather, shard": FLOAT8 | FLOAT8_ALL_GATHER | SHARD,
    "float8 all-gather, shard x tp": FLOAT8 | FLOAT8_ALL_GATHER | SHARD | TP,
    "float8 all-gather, pp x shard": FLOAT8 | FLOAT8_ALL_GATHER | PP | SHARD,
    "float8, selective AC, shard x tp": FLOAT8 | SELECTIVE | SHARD | TP,
    "float8, full AC, groups of 3, shard x tp": FLOAT8 | GROUPS_OF_3 | FULL | SHARD | TP,
    "mxfp8, compiled, full AC, groups of 3, tp": MXFP8 | COMPILED | GROUPS_OF_3 | FULL | TP,
    "int8 products, full AC, groups of 3, pp": INT8_PRODUCTS | GROUPS_OF_3 | FULL | PP,
    "float8, ZBVZeroBubble": FLOAT8 | schedule("ZBVZeroBubble"),
    **{f"mxfp8, {name}": MXFP8 | AXES[name] for name in ("pp", "shard", "cp")},
    "mxfp8, tp": Case(MXFP8 | TP, always=True),
    "mxfp8, compiled, tp": MXFP8 | COMPILED | TP,
    **{f"int8 products, {name}": Case(INT8_PRODUCTS | AXES[name], always=name in ("pp", "tp"))
       for name in ("pp", "shard", "cp", "tp")},
    "int8 products, selective AC, shard x tp": INT8_PRODUCTS | SELECTIVE | SHARD | TP,
    "8-bit optimizer states, shard": Case(INT8 | SHARD, always=True),
    "8-bit optimizer states, tp": INT8 | TP,
    "8-bit optimizer states, CPU offload": INT8 | SHARD | OFFLOAD,
    "4-bit optimizer states, shard x tp": INT4 | SHARD | TP,
    "float8 optimizer states, shard x tp": FLOAT8_STATES | SHARD | TP,
    "bfloat16 optimizer states, shard x tp": IN_FLOAT32 | {"optimizer__state_dtype": "bfloat16"} | SHARD | TP,
    "stochastic rounding, shard x tp": STOCHASTIC | SHARD | TP,
    "stochastic rounding, 8-bit optimizer states, pp x shard": INT8 | STOCHASTIC | {"model__dim": 128} | PP | SHARD,
    "float16, pp": HALF | PP,
    "float16, shard": Case(HALF | SHARD, always=True),
    "float16, chunked cross-entropy, 3 chunks, shard x tp": HALF | CHUNKED_LOSS | SHARD | TP,
}  # fmt: skip
LOW_PRECISION |= {
    "float8 tensorwise, pp": FLOAT8 | {"float8__recipe": "tensorwise"} | PP,
    "float8 tensorwise, cp": FLOAT8 | {"float8__recipe": "tensorwise"} | CP,
    **{f"float8 rowwise_with_gw_hp, {name}": FLOAT8 | {"float8__recipe": "rowwise_with_gw_hp"} | AXES[name]
       for name in ("pp", "cp", "tp")},
    "float8, cp x tp": FLOAT8 | CP | TP,
    "mxfp8, cp x tp": MXFP8 | CP | TP,
    "mxfp8, ZBVZeroBubble": MXFP8 | schedule("ZBVZeroBubble"),
    "mxfp8, full AC, shard x tp": MXFP8 | FULL | SHARD | TP,
    "mxfp8, biases and norms, shard x tp": MXFP8 | BIASES_AND_NORMS | SHARD | TP,
    "mxfp8, compiled, selective AC, shard x tp": MXFP8 | COMPILED | SELECTIVE | SHARD | TP,
    "mxfp8, shard x cp x tp": MXFP8 | SHARD | CP | TP,
    "int8 products, cp x tp": INT8_PRODUCTS | CP | TP,
    "int8 products, ZBVZeroBubble": INT8_PRODUCTS | schedule("ZBVZeroBubble"),
    "int8 products, compiled, tp": INT8_PRODUCTS | COMPILED | TP,
    "int8 products, full AC, pp": INT8_PRODUCTS | FULL | PP,
    "int8 products, biases and norms, shard x tp": INT8_PRODUCTS | BIASES_AND_NORMS | SHARD | TP,
    "int8 products, compiled, selective AC, shard x tp": INT8_PRODUCTS | COMPILED | SELECTIVE | SHARD | TP,
    "int8 products, shard x cp x tp": INT8_PRODUCTS | SHARD | CP | TP,
    "8-bit optimizer states, pp": INT8 | PP,
    "8-bit optimizer states, cp": INT8 | CP,
    "4-bit optimizer states, stochastic rounding, pp x shard": INT4 | STOCHASTIC | {"model__dim": 128} | PP | SHARD,
    "float8 optimizer states, CPU offload": FLOAT8_STATES | SHARD | OFFLOAD,
    "stochastic rounding, float32 optimizer states, shard x tp":
        STOCHASTIC | {"optimizer__state_dtype": "float32"} | SHARD | TP,
    "float16, cp": HALF | CP,
    "float16, tp": HALF | TP,
    "float8, compiled, tp": FLOAT8 | COMPILED | TP,
    "float8, shard x cp x tp": FLOAT8 | SHARD | CP | TP,
    "float8, biases and norms, shard x tp": FLOAT8 | BIASES_AND_NORMS | SHARD | TP,
    "float8, compiled, shard x tp": FLOAT8 | COMPILED | SHARD | TP,
}  # fmt: skip
LAYOUTS |= {
    **{" x ".join(names): product(*names) for names in itertools.combinations(AXES, 3) if "replicate" in names},
    **{f"{name} x {other}": schedule(name) | AXES[other] | ONE_ACCUMULATION_STEP for name in SIMPLEST
       for other in ("shard", "cp", "tp")},
    **{" x ".join(names): product(*names) for names in itertools.combinations(AXES, 4)},
    "all five axes": product(*AXES),
    "all five axes, ZBVZeroBubble, document mask": product(*AXES) | schedule("ZBVZeroBubble") | DOCUMENTS,
    "pp x ring x ulysses x tp": PP | USP | TP,
    "compiled, pp x cp x tp": COMPILED | PP | CP | TP,
    "full AC, pp x cp x tp": FULL | PP | CP | TP,
    "selective AC, pp x cp x tp": SELECTIVE | PP | CP | TP,
    "compiled, full AC, cp x tp": COMPILED | FULL | CP | TP,
    "compiled, selective AC, cp x tp": COMPILED | SELECTIVE | CP | TP,
    **{f"compiled, {mode} AC, {name}": COMPILED | {"activation_checkpoint__mode": mode} | AXES[name]
       for mode in ("full", "selective") for name in ("pp", "shard")},
    "compiled, tp, no loss parallel": COMPILED | TP | {"disable_loss_parallel": True},
    "chunked cross-entropy, 3 chunks, compiled, tp": CHUNKED_LOSS | COMPILED | TP,
    "chunked cross-entropy, 3 chunks, InterleavedZeroBubble x tp":
        CHUNKED_LOSS | schedule("InterleavedZeroBubble") | TP,
    "document mask, pp x cp x tp": DOCUMENTS | PP | CP | TP,
    "compiled, full AC, tp": COMPILED | FULL | TP,
    "compiled, selective AC, every second mm, tp": COMPILED | EVERY_SECOND_MM | TP,
    "compiled loss only, tp, no loss parallel":
        COMPILED | TP | {"compile__components": '["loss"]', "disable_loss_parallel": True},
    "compiled, cp": COMPILED | CP,
    "compiled, ulysses, document mask": COMPILED | ULYSSES | DOCUMENTS,
    "prefetch 2, cp x tp": PREFETCH | CP | TP,
    "document mask, cp 4": DOCUMENTS | {"context_parallel_degree": 4},
    "document mask, cp x tp": DOCUMENTS | CP | TP,
}  # fmt: skip


BORROWED = {"context_parallel_ulysses_degree", "expert_parallel_degree"}
"""Degrees of ranks that other degrees count."""


def world_size(layout: dict[str, Any]) -> int:
    """Return the number of ranks of a layout."""
    return int(np.prod([value for key, value in layout.items() if key.endswith("_degree") and not BORROWED & {key}]))


def by_ranks(layouts: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return layouts in the order of their ranks: a pool is needed after the other."""
    return dict(sorted(layouts.items(), key=lambda layout: world_size(layout[1])))


def with_batches(layout: dict[str, Any]) -> dict[str, Any]:
    """Return a layout's options, with two gradient accumulation steps unless it sets another number."""
    options = MODEL | layout
    order = options.get("pipeline_parallel_schedule")
    if order in V_SHAPED and torch.__version__ < "2.12":
        pytest.skip("unsupported on a CPU with torch 2.11")
    functions = {"float8__enable", "int8__enable", "training__loss_chunks", "expert_parallel_degree"} & set(options)
    if functions and order in SPLIT_BACKWARD and torch.__version__ < "2.13":
        pytest.skip("unsupported with this torch")
    data_ranks = options.get("data_parallel_replicate_degree", 1) * options.get("data_parallel_shard_degree", 1)
    accumulation_steps = options.pop("accumulation_steps", 2)
    options["training__global_batch_size"] = options["training__local_batch_size"] * data_ranks * accumulation_steps
    return options


def assert_matches_reference(ranks: Any, tmp_path: Any, layout: dict[str, Any]) -> None:
    options = with_batches(layout)
    actual = compare(ranks, tmp_path, world_size(layout), options)
    assert {name: d for name, d in actual.items() if d > TOLERANCE} == {}
    assert all(d == 0 for name, d in actual.items() if name.startswith("initial weight")), "not bit for bit"
    n_parameters = len([name for name in actual if name.startswith("initial weight")])
    assert n_parameters == 2 + options["model__n_layers"] * 9 + (not options.get("model__tie_embeddings"))
    assert len(actual) == n_parameters * (STEPS + 2) + 3 * STEPS + 1


@cases("name", by_ranks(LAYOUTS))
def test_layout_matches_reference(ranks, tmp_path, name):
    assert_matches_reference(ranks, tmp_path, LAYOUTS[name])


def largest(actual: dict[str, float]) -> float:
    """Return the largest difference of the final weights."""
    return max(difference for name, difference in actual.items() if name.startswith("final weight"))


@pytest.fixture(scope="module")
def references() -> Any:
    """A function of a config: its reference, the tolerances, and the reference without the low-precision options. It
    computes them once for all test cases that differ in their layout only."""
    computed: dict[str, Any] = {}

    def compute(job: config.Config) -> tuple[Trace, dict[str, float], Trace]:
        key = "".join(
            section.model_dump_json() for section in (job.model, job.training, job.optimizer, job.float8, job.int8)
        )
        if key not in computed:
            reference = run_reference(job, CPU, steps=STEPS)
            allowed = tolerances(job, reference, CPU, steps=STEPS)
            computed[key] = reference, allowed, run_reference(job.replace(**FULL_PRECISION), CPU, steps=STEPS)
        return computed[key]

    return compute


@cases("name", by_ranks(LOW_PRECISION))
def test_low_precision_layout_matches_reference(ranks, references, tmp_path, name):
    """A layout differs from the reference by no more than a few times the reference's own rounding error. It also
    differs from a reference in full precision as much as the reference does, or it has ignored the option."""
    options = LOW_PRECISION[name]
    n = world_size(options)
    job = resolve(tmp_path, n, with_batches(options | ONE_ACCUMULATION_STEP))
    reference, allowed, full_precision = references(job)
    layout, *_ = ranks(n).run(trace, job=job)
    actual = differences(reference, layout)
    assert {name: (d, allowed[name]) for name, d in actual.items() if d > allowed[name]} == {}
    by_option = largest(differences(full_precision, reference))
    assert 0.2 * by_option < largest(differences(full_precision, layout)) < 5 * by_option
    if name.startswith(("mxfp8", "int8 products")):
        assert_products_are_rounded(job, actual, full_precision, layout)


PRODUCT_ERROR = {"mxfp8": 2**-4 / 3**0.5, "int8": 3 / 127 / 6**0.5}
"""Relative error of a product of two rounded random matrices, in the Frobenius norm. Its square is twice that of one
rounding. float8_e4m3fn rounds m 2^e, with m from 1 to 2, by at most 2^e / 16: by 1 / (16 m) / sqrt(3) in the mean of
squares, and 1 / m^2 is 1/2 on average. INT8 rounds by at most half of 1/127 of a row's largest number, which is some
three standard deviations."""
ROUNDING_OF_FLOAT32 = 2e-6
"""Of a loss: the reference in full precision computes in float32."""


def assert_products_are_rounded(job: config.Config, actual: dict[str, float], full: Trace, layout: Trace) -> None:
    """Blocks of MXFP8 are the same on every rank, so a layout is as near to the reference as in full precision. INT8
    has scales of a rank's tokens and channels; those of the forward are of full rows, unless tensor parallelism shards
    them. The weight gradient of each converted layer has at least the error of its own product, within a factor of two,
    and at most that of all products of the step."""
    is_mxfp8 = job.float8.enable
    if is_mxfp8:
        assert max(actual.values()) < TOLERANCE
    elif job.parallelism.tensor_parallel_degree == 1:
        assert actual["step 1 loss"] < TOLERANCE
    assert (layout["step 1 loss"] - full["step 1 loss"]).abs() > ROUNDING_OF_FLOAT32
    error, products = PRODUCT_ERROR["mxfp8" if is_mxfp8 else "int8"], 7 * 3 * job.model.n_layers
    for name in [name for name in full if re.fullmatch(r"step 1 gradient layers\.\d+\..*\.w\w\.weight", name)]:
        relative = (layout[name] - full[name]).norm() / full[name].norm()
        assert error / 2 < relative < error * products**0.5, name


def _products_not_rounded(rank: int) -> Any:
    from titanlite.techniques import low_precision

    exact = dict.fromkeys(low_precision.PRODUCTS, lambda left, right: left @ right.t())
    return mock.patch.dict(low_precision.PRODUCTS, exact)


def _output_not_rounded(rank: int) -> Any:
    """Each rank rounds to INT8 in the backward only."""
    from titanlite.techniques import low_precision

    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, kind: str) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.kind = kind
        return x @ weight.t()

    return mock.patch.object(low_precision._Products, "forward", staticmethod(forward))


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["mxfp8, tp", "int8 products, tp"])
@pytest.mark.parametrize("bug", [_products_not_rounded, _output_not_rounded])
def test_products_that_are_not_rounded_are_found(ranks, references, tmp_path, name, bug):
    job = resolve(tmp_path, 2, with_batches(LOW_PRECISION[name] | ONE_ACCUMULATION_STEP))
    reference, _, full_precision = references(job)
    layout, *_ = ranks(2).run(trace, job=job, bug=bug)
    actual = differences(reference, layout)
    by_bug = differences(full_precision, layout)
    assert (max(by_bug.values()) if bug is _products_not_rounded else by_bug["step 1 loss"]) < ROUNDING_OF_FLOAT32
    with pytest.raises(AssertionError):
        assert_products_are_rounded(job, actual, full_precision, layout)


@pytest.mark.parametrize("layout", [CP, ULYSSES, PP, TP], ids=["ring", "ulysses", "pp", "tp"])
def test_one_accumulation_step(ranks, tmp_path, layout):
    assert_matches_reference(ranks, tmp_path, layout | ONE_ACCUMULATION_STEP)


def first_tokens_only(rank: int = 0) -> Any:
    """Let only the first two tokens of a sequence have a target, so that only rank 0 of a ring has valid targets."""
    real = RandomSequences.__getitem__

    def only_first(self: RandomSequences, index: int) -> Any:
        sequence = real(self, index)
        sequence.targets[:2] = sequence.inputs[1:3]
        sequence.targets[2:] = -100
        return sequence

    return mock.patch.object(RandomSequences, "__getitem__", only_first)


@pytest.mark.parametrize("layout", [{"context_parallel_degree": 4}, USP], ids=["ring 4", "ring 2 x ulysses 2"])
def test_rank_without_valid_targets(ranks, tmp_path, layout):
    job = resolve(tmp_path, 4, MODEL | layout)
    (layout_trace, *_) = ranks(4).run(trace, job=job, bug=first_tokens_only)
    with first_tokens_only():
        reference = run_reference(job, CPU, steps=STEPS)
    assert {name: d for name, d in differences(reference, layout_trace).items() if d > TOLERANCE} == {}


def largest_loss(job: config.Config) -> float:
    """Return the largest of the ranks' own losses of the first step, of which only one has valid targets."""
    with first_tokens_only():
        run = TrainingRun(job, CPU)
        batches = run.loader.next()
        loss_sum, _ = run.train_step.forward_backward(batches)
        run.loader.close()
    return run.train_step.largest_loss(loss_sum, batches)


def test_the_largest_loss_is_of_a_rank_with_valid_targets(ranks, tmp_path):
    job = resolve(tmp_path, 4, MODEL | {"context_parallel_degree": 4})
    with first_tokens_only():
        reference = run_reference(job, CPU, steps=1)
    assert ranks(4).run(largest_loss, job=job) == pytest.approx([reference["step 1 loss"].item()] * 4, abs=TOLERANCE)


def counts_of_a_step(job: config.Config) -> list[int]:
    run = TrainingRun(job, CPU)
    run.loader.next()
    sums = sum_over_ranks(torch.zeros((), dtype=torch.float64), Signals(), *run.loader.step_counts)
    run.loader.add(sums[3:].tolist())
    run.loader.close()
    return run.loader.counts.tolist()


@pytest.mark.parametrize("axis", ["tensor", "pipeline", "context"])
def test_positions_are_counted_once_whatever_ranks_share_them(ranks, tmp_path, axis):
    job = resolve(tmp_path, 4, MODEL | {f"{axis}_parallel_degree": 2, "data_parallel_shard_degree": 2})
    counts = ranks(4).run(counts_of_a_step, job=job)
    assert counts == counts[:1] * 4, "ranks differ"
    assert (counts[0][0], counts[0][2]) == (job.tokens_per_step, 0), "positions, padding"


# Injected bugs -------------------------------------------------------------------------------------------------------


def _vocabulary_shard_taken_for_full(rank: int) -> Any:
    """Each rank takes its shard of the vocabulary for all of it."""
    real = loss.cross_entropy
    return mock.patch.object(loss, "cross_entropy", lambda logits, targets, group: real(logits, targets % 30))


def _norm_missing_in_plan(rank: int) -> Any:
    """The norm gets a sharded sequence, and each rank keeps the gradient of its shard."""
    return mock.patch.dict(tensor.BLOCK_STYLES, {"ffn_norm": tensor.PrepareModuleInput()})


def _colwise_instead_of_rowwise(rank: int) -> Any:
    return mock.patch.dict(tensor.BLOCK_STYLES, {"feed_forward.w2": ColwiseParallel()})


def _zig_zag_off_by_one(rank: int) -> Any:
    real = tiles.local_positions

    def off(seq_len: int, *, ring: int, ulysses: int, rank: int) -> torch.Tensor:
        return real(seq_len, ring=ring, ulysses=ulysses, rank=rank).roll(1)

    return mock.patch.object(tiles, "local_positions", off)


def _no_sum_over_context(rank: int) -> Any:
    """Gradients are not summed over context-parallel ranks."""
    single = init_device_mesh("cpu", (2, 1), mesh_dim_names=("all", "single"))["single"]
    real = fsdp.fully_shard
    return mock.patch.object(fsdp, "fully_shard", lambda m, mesh, **kwargs: real(m, mesh=single, **kwargs))


def _gradients_scaled_by_microbatches(rank: int) -> Any:
    real = pipeline.get_schedule_class

    def scaling(name: str) -> Any:
        kind = real(name)
        make = kind.__init__
        return type(name, (kind,), {"__init__": lambda s, *a, **k: make(s, *a, **k | {"scale_grads": True})})

    return mock.patch.object(pipeline, "get_schedule_class", scaling)


def _replicated_gradients_counted_twice(rank: int) -> Any:
    return mock.patch.object(optimizer, "n_replicas", return_value=1)


def _positions_not_offset(rank: int) -> Any:
    real = loader.collate

    def local(*arguments: Any, **options: Any) -> Batch:
        batch = real(*arguments, **options)
        return batch._replace(positions=torch.arange(batch.tokens.shape[1]).expand_as(batch.tokens).contiguous())

    return mock.patch.object(loader, "collate", local)


def _document_mask_ignored(rank: int) -> Any:
    """Attention crosses document boundaries."""
    real = loader.collate

    def without_document_positions(*arguments: Any, **options: Any) -> Batch:
        return real(*arguments, **options)._replace(document_positions=None)

    return mock.patch.object(loader, "collate", without_document_positions)


@cases(
    ("bug", "layout", "first"),
    [
        (_vocabulary_shard_taken_for_full, TP, "step 1 loss"),
        (_norm_missing_in_plan, TP, "step 1 norm"),
        (_zig_zag_off_by_one, CP, "step 1 loss"),
        (_no_sum_over_context, CP, "step 1 norm"),
        (_gradients_scaled_by_microbatches, PP, "step 1 norm"),
        (_gradients_scaled_by_microbatches, schedule("InterleavedZeroBubble"), "step 1 norm"),
        (_replicated_gradients_counted_twice, TP, "step 1 norm"),
        (_positions_not_offset, CP, "step 1 loss"),
        (_positions_not_offset, ULYSSES, "step 1 loss"),
        (_document_mask_ignored, CP | DOCUMENTS, "step 1 loss"),
    ],
    always=[(_zig_zag_off_by_one, CP, "step 1 loss"), (_no_sum_over_context, CP, "step 1 norm")],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_injected_bug_fails(ranks, tmp_path, bug, layout, first):
    actual = compare(ranks, tmp_path, 2, MODEL | layout, bug)
    assert next(name for name, d in actual.items() if d > 10 * TOLERANCE) == first


def test_invalid_tensor_parallel_plan_raises(ranks, tmp_path):
    with pytest.raises(RankError, match="reduction dim"):
        compare(ranks, tmp_path, 2, MODEL | TP, _colwise_instead_of_rowwise)


def operator_counts(job: config.Config) -> tuple[int, int, int]:
    """Count the matrix products, attentions and SwiGLU's silus of a step's forward and backward."""
    counted = CountCalls("aten")
    forward_backward(job, counted)
    attention = "_scaled_dot_product_flash_attention_for_cpu"
    return counted.calls["mm"], counted.calls[attention], counted.calls["silu"]


@pytest.mark.parametrize(
    ("options", "products", "attentions", "silus"),
    [
        ({}, 0, 0, 0),
        (FULL, 6, 1, 1),
        (SELECTIVE, 0, 0, 1),
        (EVERY_SECOND_MM, 3, 0, 1),
        (SAVED_ATTENTION, 6, 0, 1),
        (EVERY_2_LAYERS, 3, 0.5, 0.5),
        (EVERY_2_LAYERS | {"activation_checkpoint__selective_ac_option": 4}, 1.5, 0.25, 0.25),
    ],
    ids=["no AC", "full AC", "selective AC", "every second mm", "attention", "every 2 layers", "every 4 layers"],
)
def test_recomputed_operators(ranks, tmp_path, options, products, attentions, silus):
    """Without AC, a block computes 7 products and their 14 gradients. No gradient needs the last product, so full AC,
    which recomputes only what the backward asks for, does not recompute it."""
    layers = 4
    job = resolve(tmp_path, 1, MODEL | options | {"model__n_layers": layers})
    (counts,) = ranks(1).run(operator_counts, job=job)
    once = layers * 21 + 3, layers, layers
    assert counts == tuple(n + layers * more for n, more in zip(once, (products, attentions, silus), strict=True))


def test_which_products_every_second_mm_saves():
    """The first, the third and so on, as torchtitan 0.2.2, and the same ones when the block is computed again."""
    with mock.patch.object(activation_checkpoint, "selective_contexts", lambda policy: policy):
        policy = activation_checkpoint._every_second_mm()
    for is_recompute in (False, True):
        context = SelectiveCheckpointContext(is_recompute=is_recompute)
        decisions = [policy(context, torch.ops.aten.mm.default) for _ in range(4)]
        assert [decision is CheckpointPolicy.MUST_SAVE for decision in decisions] == [True, False, True, False]


def prefetched(job: config.Config) -> list[tuple[int, int]]:
    """Return how many units each block prefetches, in forward and backward (private to FSDP, as of torch 2.13)."""
    model, _ = build.build_model(job, mesh.build_layout(job.parallelism, CPU), CPU)
    states = [block._get_fsdp_state() for block in model.layers.values()]
    return [(len(s._states_to_forward_prefetch), len(s._states_to_backward_prefetch)) for s in states]


def test_prefetch_reaches_fsdp(ranks, tmp_path):
    options = {"fsdp_forward_prefetch": 2, "fsdp_backward_prefetch": 1, "model__n_layers": 4}
    assert ranks(1).run(prefetched, job=resolve(tmp_path, 1, options)) == [[(2, 0), (2, 1), (1, 1), (0, 1)]]


def shares_its_weight(job: config.Config) -> bool:
    """Return whether the output head has the embedding's weight once both are sharded, before FSDP takes them."""
    model = build.meta_model(job)
    parallelize.shard_weights(model, mesh.build_layout(job.parallelism, CPU).mesh["tp"], None)
    return model.output.weight is model.tok_embeddings.weight


@pytest.mark.parametrize("tied", [True, False])
def test_tensor_parallel_keeps_tied_embeddings_tied(ranks, tmp_path, tied):
    """FSDP would take the weight twice, gather it twice and reduce two gradients."""
    job = resolve(tmp_path, 2, {"tensor_parallel_degree": 2, "model__tie_embeddings": tied})
    assert ranks(2).run(shares_its_weight, job=job) == [tied, tied]


class StopLater(Signals):
    """Signals that ask to stop from the second batch of a validation on."""

    def __init__(self) -> None:
        self.looks = itertools.count()

    @property
    def stopping(self) -> bool:
        return next(self.looks) > 0


def gathered_after_a_validation(job: config.Config, *, stopped: bool) -> list[str]:
    """Return the parameters that are not shards after a validation, or after one that a signal has stopped."""
    training = TrainingRun(job, CPU)
    loss = training.train_step.validate(training.loader.next(), signals=StopLater() if stopped else None)
    training.loader.close()
    assert (loss is None) == stopped
    return [name for name, parameter in training.model.named_parameters() if not isinstance(parameter, DTensor)]


@pytest.mark.parametrize("stopped", [False, True], ids=["", "stopped"])
def test_a_validation_leaves_no_weight_gathered(ranks, tmp_path, stopped):
    """A save would find no shards."""
    job = resolve(tmp_path, 2, with_batches(SHARD | {"fsdp_reshard_after_forward": "never"}))
    assert ranks(2).run(gathered_after_a_validation, job=job, stopped=stopped) == [[], []]


def losses_of_both_passes(job: config.Config) -> list[tuple[float, float]]:
    """Return this rank's sums of token losses as a validation and as a step computes them, batch by batch."""
    run, one = TrainingRun(job, CPU), torch.ones((), dtype=torch.float64)
    runner, batches = run.train_step.runner, run.loader.next()
    run.loader.close()
    return [(runner.forward(batch).item(), runner.forward_backward(batch, one).item()) for batch in batches]


def test_a_pipeline_validates_microbatches_with_their_own_documents(ranks, tmp_path):
    """In the reference's validation batch, the first documents of both microbatches end beyond the valid targets."""
    job = resolve(tmp_path, 2, with_batches(DOCUMENTS | PP))
    first, last = ranks(2).run(losses_of_both_passes, job=job)
    assert first == [(0, 0)] * 2
    assert all(forward == pytest.approx(step, rel=1e-13) and step > 10 for forward, step in last)


def timeouts(job: config.Config) -> set[float]:
    """Return the timeouts of this rank's process groups in seconds, once they have been set to 77 s."""
    build.build_model(job, mesh.build_layout(job.parallelism, CPU), CPU)
    set_timeout(CPU, 77)
    groups = list(dist.distributed_c10d._world.pg_map)
    found = {group._get_backend(CPU).options._timeout.total_seconds() for group in groups}
    set_timeout(CPU, 60)
    return found


def test_every_process_group_has_the_timeout(ranks, tmp_path):
    """Also those that FSDP makes for itself when it reshards to fewer ranks after the forward pass."""
    options = {"fsdp_reshard_after_forward": 2}
    assert ranks(4).run(timeouts, job=resolve(tmp_path, 4, options)) == [{77.0 + BACKSTOP_SECONDS}] * 4


def graphs(job: config.Config) -> int:
    """Count the graphs that dynamo makes of a step."""
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    run_layout(job, config.Launch.from_environment(n_devices=0), steps=1)
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.nightly
@pytest.mark.parametrize(
    "options", [{}, FULL, SELECTIVE, CHUNKED_LOSS], ids=["", "full AC", "selective AC", "chunked cross-entropy"]
)
def test_repeated_blocks_are_compiled_once(ranks, tmp_path, options):
    counts = []
    for n_layers in (2, 5):
        job = resolve(tmp_path, 1, MODEL | COMPILED | options | {"model__n_layers": n_layers})
        counts += ranks(1).run(graphs, job=job)
    assert counts[0] == counts[1] > 0


@pytest.mark.nightly
def test_only_the_named_components_are_compiled(ranks, tmp_path):
    counts = []
    for named in '["model"]', '["loss"]', '["model", "loss"]':
        job = resolve(tmp_path, 1, MODEL | COMPILED | {"compile__components": named})
        counts += ranks(1).run(graphs, job=job)
    of_blocks, of_loss, of_both = counts
    assert of_blocks > 0
    assert of_loss > 0
    assert of_both == of_blocks + of_loss


# The tensor-parallel plan --------------------------------------------------------------------------------------------


def test_plan_covers_every_parameter_of_a_block():
    """Each module with parameters is in the plan: one that it lacks would stay a plain tensor, unsharded."""
    job = config.Config().replace(model__qk_norm=True, model__norm_placement="both", model__learned_positions=8)
    (block, *_) = build.meta_model(job).layers.values()
    modules = {name.rpartition(".")[0] for name, _ in block.named_parameters()}
    assert modules <= set(tensor.BLOCK_STYLES)
    assert set(tensor.BLOCK_STYLES) - modules == {"attention", "feed_forward"}, "the other entries gather the sequence"
    ends = {name for name, _ in build.meta_model(job).named_children()} - {"layers"}
    assert ends == set(tensor.ENDS)


def local_fractions(job: config.Config) -> dict[str, float]:
    """Return which fraction of each parameter's elements this rank has."""
    layout = mesh.build_layout(job.parallelism, CPU)
    model, _ = build.build_model(job, layout, CPU)
    return {name: p.to_local().numel() / p.numel() for name, p in model.named_parameters()}


def test_each_rank_has_one_shard_of_every_matrix(ranks, tmp_path):
    for fractions in ranks(4).run(local_fractions, job=resolve(tmp_path, 4, MODEL | TP | SHARD)):
        assert {fraction for name, fraction in fractions.items() if "norm" not in name} == {1 / 4}
        assert {fraction for name, fraction in fractions.items() if "norm" in name} == {1 / 2}, "replicated over tp"


# Resume under another layout -----------------------------------------------------------------------------------------

FROM = PP | SHARD | CP
TO = {
    "single process": {},
    "tp 4": {"tensor_parallel_degree": 4},
    "pp, another split": PP | {"pipeline_parallel_last_stage_less_layers": 2},
    "pp x tp, zero-bubble": schedule("InterleavedZeroBubble") | TP,
    "HSDP x cp": REPLICATE | SHARD | CP,
    "shard x ulysses x tp": SHARD | ULYSSES | TP,
}


def trace_with_checkpoint(job: config.Config, folder: Any, steps: int) -> Trace | None:
    """Resume from the checkpoint of a folder, if there is one, take some steps, and save."""
    launch = config.Launch.from_environment(n_devices=0)
    options = config.schema.Checkpoint(folder=".", keep_latest_k=0)
    checkpointer = Checkpointer(folder, options, {}, job.comm)
    result = run_layout(job, launch, steps=steps, checkpointer=checkpointer)
    checkpointer.close()
    return result if launch.rank == 0 else None


def two_steps(ranks: Any, tmp_path: Any, layout: dict[str, Any], folder: Any) -> tuple[config.Config, Trace]:
    """Take two more steps from the folder's checkpoint, and save there again."""
    n = world_size(layout)
    same = {"model__n_layers": 4, "training__local_batch_size": 2, "training__global_batch_size": 8}
    job = resolve(tmp_path, n, MODEL | layout | same)
    result, *_ = ranks(n).run(trace_with_checkpoint, job=job, folder=folder, steps=2)
    return job, result


def values_of_steps(trace: Trace, name: str) -> list[float]:
    """Return the loss or the norm of each step."""
    return [value.item() for key, value in trace.items() if key.startswith("step ") and key.endswith(f" {name}")]


def final_weights(trace: Trace) -> Trace:
    return {name: weight for name, weight in trace.items() if name.startswith("final weight ")}


@pytest.fixture(scope="module")
def saved(ranks: Any, tmp_path_factory: Any) -> tuple[Any, Trace]:
    """The folder of a checkpoint after two steps, and their trace."""
    folder = tmp_path_factory.mktemp("saved")
    return folder / "checkpoint", two_steps(ranks, folder, FROM, folder / "checkpoint")[1]


@cases("name", TO)
def test_resume_under_another_layout(ranks, saved, tmp_path, name):
    """Two steps under one layout and two under another match four of the single-process reference."""
    checkpoint, before = saved
    shutil.copytree(checkpoint, tmp_path / "checkpoint")
    job, after = two_steps(ranks, tmp_path, TO[name], tmp_path / "checkpoint")
    reference = run_reference(job, CPU, steps=4)
    for name in ("loss", "norm"):
        resumed = values_of_steps(before, name) + values_of_steps(after, name)
        assert resumed == pytest.approx(values_of_steps(reference, name), abs=TOLERANCE)
    actual = differences(final_weights(reference), final_weights(after))
    assert {name: difference for name, difference in actual.items() if difference > TOLERANCE} == {}


# Of 97 rows of 128, two shards have 49, which are no complete blocks of 256, and 48, which are.
UNEVEN = {"model__ffn_dim": 97, "training__dtype": "bfloat16"}
RESUMED_STATES = {
    "int8": (INT8, TP),
    "int4": (INT4, TP),
    "float8": (FLOAT8_STATES, TP),
    "bfloat16": (INT8 | {"optimizer__state_dtype": "bfloat16"}, TP),
    "int8, uneven shards": (INT8 | UNEVEN, {}),
    "in host memory": (IN_FLOAT32 | HOST_STATES, TP),
    "Muon's": (IN_FLOAT32 | MUON, TP),
    "float8, uneven shards": (FLOAT8_STATES | UNEVEN, {}),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", RESUMED_STATES)
def test_low_bit_optimizer_states_resume_under_another_layout(ranks, tmp_path, name):
    """Two FSDP shards save their own optimizer states. The blocks of quantized ones differ under another layout."""
    low_bit, layout = RESUMED_STATES[name]
    _, before = two_steps(ranks, tmp_path, low_bit | SHARD, tmp_path / "checkpoint")
    job, after = two_steps(ranks, tmp_path, low_bit | layout, tmp_path / "checkpoint")
    reference = run_reference(job, CPU, steps=4)
    allowed = tolerances(job, reference, CPU, steps=4)
    losses = values_of_steps(before, "loss") + values_of_steps(after, "loss")
    assert losses == pytest.approx(values_of_steps(reference, "loss"), abs=allowed["step 4 loss"])
    actual = differences(final_weights(reference), final_weights(after))
    assert {name: d for name, d in actual.items() if d > allowed[name]} == {}
