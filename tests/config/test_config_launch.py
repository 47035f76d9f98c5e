# ruff: noqa: F403, F405
"""A config and a launch: what `check` rejects, what it resolves, and how many ranks a launch has."""

import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests.helpers.config import *
from titanlite import config
from titanlite.config import Launch
from titanlite.launch import agent, launcher

# fmt: off
REJECTED = [
    ({SHARD: 1}, on(4), {SHARD: "shard 1 needs 1 rank"}),
    ({SHARD: 4, REPLICATE: 2}, on(4, devices=8), {SHARD: "replicate 2 x shard 4 needs 8 ranks"}),
    ({REPLICATE: 8}, on(4), {REPLICATE: "replicate 8 needs a multiple of 8 ranks"}),
    # the shards of one replica; context-parallel ranks shard too
    ({RESHARD: 4, REPLICATE: 2}, on(8), {RESHARD: 'expected one of "default", "always", "never", 2 for 4 shards'}),
    ({RESHARD: 4, CONTEXT: 2}, on(4), {RESHARD: 'expected one of "default", "always", "never", 2 for 4 shards'}),
    ({RESHARD: 2, REPLICATE: 2}, on(4), {RESHARD: 'expected one of "default", "always", "never" for 2 shards'}),
    ({RESHARD: 3, CONTEXT: 4, REPLICATE: 2}, on(16),
     {RESHARD: 'expected one of "default", "always", "never", 2, 4 for 8 shards'}),
    ({RESHARD: 2}, on(1), {RESHARD: 'expected one of "default", "always", "never" for 1 shard'}),
    # one degree that does not divide the ranks; several, with and without a shard degree
    ({CONTEXT: 4}, on(6), {CONTEXT: "context 4 needs a multiple of 4 ranks"}),
    ({f"--{TENSOR}": 2}, on(1), {TENSOR: "tensor 2 needs a multiple of 2 ranks"}),
    ({PIPELINE: 3}, on(8, devices=8), {PIPELINE: "pipeline 3 needs a multiple of 3 ranks"}),
    ({PIPELINE: 2, TENSOR: 2}, on(6), {PIPELINE: "pipeline 2 x tensor 2 needs a multiple of 4 ranks"}),
    ({CONTEXT: 2, f"--{REPLICATE}": 3}, on(8, devices=8),
     {REPLICATE: "replicate 3 x context 2 needs a multiple of 6 ranks"}),
    ({PIPELINE: 2, REPLICATE: 2, CONTEXT: 2, TENSOR: 4, SHARD: 2}, on(32),
     {SHARD: "pipeline 2 x replicate 2 x context 2 x tensor 4 x shard 2 needs 64 ranks"}),
    ({TENSOR: 2, SHARD: 4}, on(4, devices=8), {SHARD: "tensor 2 x shard 4 needs 8 ranks"}),
    # ranks that share sequences count once
    ({TENSOR: 2, GLOBAL_BATCH: 24}, on(4),
     {GLOBAL_BATCH: "multiple of local_batch_size x data-parallel ranks = 8 x 2 = 16"}),
    ({PIPELINE: 2, CONTEXT: 2, REPLICATE: 3, f"--{GLOBAL_BATCH}": 32}, on(12),
     {GLOBAL_BATCH: "multiple of local_batch_size x data-parallel ranks = 8 x 3 = 24"}),
    ({**C4_STREAM, STREAMING_SHARDS: 4, TENSOR: 2, CONTEXT: 2}, on(12),
     {STREAMING_SHARDS: "multiple of the data-parallel degree 3"}),
    # what the devices support, by the data type that the model computes in
    ({BACKEND: "flash", CONTEXT: 2}, on(2), {BACKEND: 'expected one of "auto", "cpu", "math" on a CPU'}),
    ({MASK: True, BACKEND: "cpu"}, on(1, devices=1),
     {BACKEND: 'expected one of "auto", "flash", "cudnn", "efficient", "math" on CUDA in bfloat16'}),
    ({MASK: True, PARAM: "float32", BACKEND: "flash"}, on(1, devices=1),
     {BACKEND: 'expected one of "auto", "efficient", "math" on CUDA in float32'}),
    ({BACKEND: "flash", CONTEXT: 2, f"--{DTYPE}": "bfloat16", f"--{PARAM}": "float32"}, on(2, devices=2),
     {BACKEND: 'expected one of "auto", "efficient", "math" on CUDA in float32'}),
    ({MASK: True, BACKEND: "cudnn"}, on(1, devices=1), {BACKEND: "cuDNN takes dense tensors"}),
    ({WINDOW: 2047, BACKEND: "cudnn"}, on(1, devices=1), {BACKEND: "cuDNN takes dense tensors"}),
    ({"model.head_dim": 20, BACKEND: "flash"}, on(1, devices=1), {BACKEND: "a multiple of 8, and it is 20; set"}),
    ({"model.head_dim": 20, MASK: True}, on(1, devices=1), {BACKEND: "a multiple of 8, and it is 20; set"}),
    ({CONTEXT: 4, ULYSSES: 2, BACKEND: "cudnn"}, on(4, devices=4), {BACKEND: "cuDNN takes dense tensors"}),
    ({MASK: True, PARAM: "float16", BACKEND: "cpu"}, on(1, devices=1),
     {BACKEND: 'expected one of "auto", "flash", "cudnn", "efficient", "math" on CUDA in float16'}),
    ({DTYPE: "float64", CONTEXT: 2, f"--{BACKEND}": "efficient"}, on(2, devices=2),
     {BACKEND: 'expected one of "auto", "math" on CUDA in float64'}),
    # a mask needs a backend with context parallelism turned off, too
    ({BACKEND: "flash", CONTEXT: 1, f"--{MASK}": True}, on(1),
     {BACKEND: 'expected one of "auto", "cpu", "math" on a CPU'}),
    ({COMPILE: True, TENSOR: 2, ASYNC: True}, on(2), {ASYNC: "needs CUDA, and this run is on a CPU"}),
    ({FLOAT8: True}, on(1), {FLOAT8: "needs CUDA, and this run is on a CPU"}),
    ({"debug.sdc_check_freq": 2}, on(1, devices=1), {"debug.sdc_check_freq": "set debug.deterministic = true"}),
    ({FLOAT8: True, PARAM: "float16"}, on(1, devices=1),
     {FLOAT8: "float8 products are bfloat16, and the model computes in float16"}),
    (C4_STREAM, on(3), {STREAMING_SHARDS: "multiple of the data-parallel degree 3"}),
    # every rule at once, for the ranks that the degrees need
    ({**C4_STREAM, STREAMING_SHARDS: 6, SHARD: 4, SNAPSHOT: True, f"--{GLOBAL_BATCH}": 24, f"--{RESHARD}": 3}, on(6),
     {SHARD: "shard 4 needs 4 ranks", RESHARD: 'expected one of "default", "always", "never", 2 for 4 shards',
     GLOBAL_BATCH: "multiple of local_batch_size x data-parallel ranks = 8 x 4 = 32",
     STREAMING_SHARDS: "multiple of the data-parallel degree 4", SNAPSHOT: "needs CUDA, and this run is on a CPU"}),
    ({**C4_STREAM, GLOBAL_BATCH: 40, BACKEND: "flash", COMPILE: True, PIPELINE: 2, CONTEXT: 2, TENSOR: 2, SHARD: 3,
     ASYNC: True}, on(8), {SHARD: "pipeline 2 x context 2 x tensor 2 x shard 3 needs 24 ranks",
     GLOBAL_BATCH: "multiple of local_batch_size x data-parallel ranks = 8 x 3 = 24",
     STREAMING_SHARDS: "multiple of the data-parallel degree 3",
     BACKEND: 'expected one of "auto", "cpu", "math" on a CPU', ASYNC: "needs CUDA, and this run is on a CPU"}),
]
# fmt: on


@pytest.mark.parametrize(("settings", "launch", "rejected"), named(REJECTED))
def test_rejected(tmp_path: Path, settings: Settings, launch: Launch, rejected: Rejected):
    loaded = load(tmp_path, settings)
    assert_rejected(lambda: config.check(loaded, launch), settings, rejected)


PLAN = "titanlite plan FILE predicts memory and step time"
TOO_MANY = (
    "on this node, which has 8 devices; start fewer ranks (smaller degrees, or NGPU), or use more nodes (NNODES); "
    f"{PLAN}"
)
MESSAGES = {
    "one device": (
        {},
        on(4, nodes=2, devices=1),
        f"FILE: 2 ranks {TOO_MANY}".replace("8 devices", "1 device"),
    ),
    "too many ranks on a node, and another problem": (
        {GLOBAL_BATCH: 16},
        on(9, devices=8),
        f"FILE: 9 ranks {TOO_MANY}\n"
        "FILE: training.global_batch_size = 16: expected a multiple of local_batch_size x ranks = 8 x 9 = 72",
    ),
    "shards that do not fit": (
        {REPLICATE: 2, SHARD: 4},
        on(4, devices=8),
        "FILE: parallelism.data_parallel_shard_degree = 4: replicate 2 x shard 4 needs 8 ranks, and the launch has 4; "
        "start 8 (titanlite train does, without NGPU), or set the degrees to the ranks there are",
    ),
    "degrees that do not divide the ranks": (
        {PIPELINE: 2, TENSOR: 2},
        on(6),
        "FILE: parallelism.pipeline_parallel_degree = 2: pipeline 2 x tensor 2 needs a multiple of 4 ranks, and the "
        "launch has 6; start that many, or change the degrees",
    ),
    "groups of shards": (
        {RESHARD: 3, CONTEXT: 4, REPLICATE: 2},
        on(16),
        'FILE: parallelism.fsdp_reshard_after_forward = 3: expected one of "default", "always", "never", 2, 4 for 8 '
        "shards",
    ),
    "global batch size": (
        {TENSOR: 2, GLOBAL_BATCH: 24},
        on(4),
        "FILE: training.global_batch_size = 24: expected a multiple of local_batch_size x data-parallel ranks = 8 x 2 "
        "= 16",
    ),
    "streaming shards": (
        C4_STREAM,
        on(3),
        "FILE: training.streaming_shards = 64 (default): expected a multiple of the data-parallel degree 3, so that no "
        "two ranks share a shard",
    ),
    "attention backend": (
        {MASK: True, PARAM: "float32", BACKEND: "flash"},
        on(1, devices=1),
        'FILE: training.attention_backend = "flash": expected one of "auto", "efficient", "math" on CUDA in float32',
    ),
    "float8 on a CPU": (
        {FLOAT8: True},
        on(1),
        "FILE: float8.enable = true: needs CUDA, and this run is on a CPU; set float8.emulate = true, or this to false",
    ),
    "MXFP8 on a CPU": (
        {FLOAT8: True, RECIPE: "mxfp8"},
        on(1),
        "FILE: float8.enable = true: needs CUDA, and this run is on a CPU; set float8.emulate = true, or this to false",
    ),
    "MXFP8 compiled on a CPU": (
        {FLOAT8: True, RECIPE: "mxfp8", EMULATE: True, COMPILE: True},
        on(1),
        'FILE: compile.backend = "inductor" (default): inductor\'s C++ fails on the blocks of MXFP8, and this run is '
        'on a CPU; set "aot_eager", or compile.enable = false',
    ),
    "float8 in float16": (
        {FLOAT8: True, PARAM: "float16"},
        on(1, devices=1),
        "FILE: float8.enable = true: float8 products are bfloat16, and the model computes in float16; set "
        "float8.emulate = true, or this to false",
    ),
}


@pytest.mark.parametrize(("settings", "launch", "message"), MESSAGES.values(), ids=MESSAGES)
def test_message(tmp_path: Path, settings: Settings, launch: Launch, message: str):
    loaded = load(tmp_path, settings)
    assert "\n".join(problems(lambda: config.check(loaded, launch))) == message.replace("FILE", loaded.file)


# ---------------------------------------------------------------------------------------------------------------------
# Old versions of torch


@pytest.mark.parametrize("schedule", ["ZBVZeroBubble", "DualPipeV"])
def test_v_shaped_schedules_on_a_cpu_need_torch_2_12(tmp_path: Path, schedule: str):
    settings = {PIPELINE: 2, SCHEDULE: schedule}
    loaded = load(tmp_path, settings)
    interleaved = load(tmp_path, {PIPELINE: 2, SCHEDULE: "InterleavedZeroBubble"})
    turned_off = load(tmp_path, {**settings, f"--{PIPELINE}": 1})
    message = "torch 2.11 lets a rank of a V-shaped schedule send to itself, which gloo cannot; use a newer torch, or "
    for version in "2.11.0", "2.11.1+cpu", "2.11.0a0+git1234567":
        with patch("importlib.metadata.version", return_value=version):
            assert_rejected(lambda: config.check(loaded, on(2)), settings, {SCHEDULE: message})
            config.check(loaded, on(2, devices=2))
            config.check(interleaved, on(2))
            config.check(turned_off, on(2))
    for version in "2.12.0", "2.13.0+cpu", "3.0.0":
        with patch("importlib.metadata.version", return_value=version):
            config.check(loaded, on(2))


ZERO_BUBBLE = {PIPELINE: 2, SCHEDULE: "InterleavedZeroBubble"}
SPLIT = 'fails in its split backward under "InterleavedZeroBubble"; use torch 2.13, or another schedule'


@pytest.mark.parametrize(
    ("settings", "remedy", "rejected", "versions"),
    [
        pytest.param(
            {**ZERO_BUBBLE, "training.loss_chunks": 2},
            {f"--{SCHEDULE}": "1F1B"},
            {"training.loss_chunks": SPLIT},
            ["2.11", "2.12"],
            id="chunked cross-entropy",
        ),
        pytest.param(
            {**ZERO_BUBBLE, FLOAT8: True, EMULATE: True},
            {f"--{SCHEDULE}": "1F1B"},
            {FLOAT8: SPLIT},
            ["2.11", "2.12"],
            id="float8",
        ),
        pytest.param(
            {**ZERO_BUBBLE, INT8: True}, {f"--{SCHEDULE}": "1F1B"}, {INT8: SPLIT}, ["2.11", "2.12"], id="int8"
        ),
        pytest.param(
            {**ZERO_BUBBLE, SHARD: 2, EXPERT: 2, EXPERTS: 4},
            {f"--{SCHEDULE}": "1F1B"},
            {EXPERT: SPLIT},
            ["2.11", "2.12"],
            id="expert parallel",
        ),
    ],
)
def test_what_an_old_torch_does_wrong_is_rejected_there(
    tmp_path: Path, settings: Settings, remedy: Settings, rejected: Rejected, versions: list[str]
):
    loaded, remedied = load(tmp_path, settings), load(tmp_path, {**settings, **remedy})
    launch = on(settings.get(SHARD, 1) * settings[PIPELINE])
    for version in "2.11", "2.12", "2.13", "2.15":
        with patch("importlib.metadata.version", return_value=f"{version}.1+cu130"):
            if version in versions:
                assert_rejected(lambda: config.check(loaded, launch), settings, rejected)
                assert f": torch {version} " in problems(lambda: config.check(loaded, launch))[0]
            else:
                config.check(loaded, launch)
            config.check(remedied, launch)


# ---------------------------------------------------------------------------------------------------------------------
# What a launch resolves

RESOLVED_KEYS = (REPLICATE, SHARD, GLOBAL_BATCH, PARAM, REDUCE_DTYPE, TOTAL_STEPS)
GPU = on(1, devices=1)
# fmt: off
RESOLVED = {  # settings, launch, values of RESOLVED_KEYS
    "one CPU rank":     ({},                                      on(1),  (1, 1, 8, "float32", "float32", 10_000)),
    "eight GPUs":       ({},                           on(8, devices=8),  (1, 8, 64, "bfloat16", "float32", 10_000)),
    "two nodes":        ({},                 on(16, devices=8, nodes=2),  (1, 16, 128, "bfloat16", "float32", 10_000)),
    "replicas":         ({REPLICATE: 2},                          on(4),  (2, 2, 32, "float32", "float32", 10_000)),
    "only replicas":    ({REPLICATE: 4},                          on(4),  (4, 1, 32, "float32", "float32", 10_000)),
    "groups of shards": ({RESHARD: 2},                            on(4),  (1, 4, 32, "float32", "float32", 10_000)),
    "bfloat16 on CPU":  ({DTYPE: "bfloat16"},                     on(1),  (1, 1, 8, "bfloat16", "float32", 10_000)),
    "bfloat16 on GPU":  ({DTYPE: "bfloat16"},                       GPU,  (1, 1, 8, "bfloat16", "float32", 10_000)),
    "float64 on CPU":   ({DTYPE: "float64"},                      on(1),  (1, 1, 8, "float64", "float64", 10_000)),
    "float64 on GPU":   ({DTYPE: "float64"},                        GPU,  (1, 1, 8, "float64", "float64", 10_000)),
    "float16 on CPU":   ({PARAM: "float16"},                      on(1),  (1, 1, 8, "float16", "float32", 10_000)),
    "float16 on GPU":   ({PARAM: "float16"},                        GPU,  (1, 1, 8, "float16", "float32", 10_000)),
    "explicit types":   ({PARAM: "float32", REDUCE_DTYPE: "bfloat16"}, GPU, (1, 1, 8, "float32", "bfloat16", 10_000)),
    "steps":            ({STEPS: 7},                              on(1),  (1, 1, 8, "float32", "float32", 7)),
    "explicit total":   ({TOTAL_STEPS: 10_001},                   on(1),  (1, 1, 8, "float32", "float32", 10_001)),
    "accumulation":     ({GLOBAL_BATCH: 96},                      on(2),  (1, 2, 96, "float32", "float32", 10_000)),
}

OFFLOAD = "training.enable_cpu_offload"
EXPERTS_OVER_TP = {EXPERTS: 4, PER_TOKEN: 2, "model.moe.expert_dim": 32, TENSOR: 2, EXPERT: 2}
RESOLVED_PARALLELISM_KEYS = (SHARD, GLOBAL_BATCH, RESHARD, BACKEND, STAGES)
RESOLVED_PARALLELISM = {  # settings, launch, values of RESOLVED_PARALLELISM_KEYS
    "one CPU rank":        ({}, on(1),                                              (1, 8, "never", "auto", 1)),
    "bfloat16":            ({MASK: True}, GPU,                                      (1, 8, "never", "flash", 1)),
    "bfloat16 weights":    ({MASK: True, DTYPE: "bfloat16"}, GPU,                   (1, 8, "never", "flash", 1)),
    "float16":             ({MASK: True, PARAM: "float16"}, GPU,                    (1, 8, "never", "flash", 1)),
    "float32":             ({MASK: True, PARAM: "float32"}, GPU,                    (1, 8, "never", "efficient", 1)),
    "float64":             ({MASK: True, DTYPE: "float64"}, GPU,                    (1, 8, "never", "math", 1)),
    "bfloat16 on CPU":     ({MASK: True, DTYPE: "bfloat16"}, on(1),                 (1, 8, "never", "cpu", 1)),
    "float64 on CPU":      ({MASK: True, DTYPE: "float64"}, on(1),                  (1, 8, "never", "cpu", 1)),
    "cp, explicit":        ({CONTEXT: 2, BACKEND: "efficient"}, on(2, devices=2),   (1, 8, "always", "efficient", 1)),
    "cp, explicit on CPU": ({CONTEXT: 2, BACKEND: "math"}, on(2),                   (1, 8, "always", "math", 1)),
    "cp, bfloat16":        ({CONTEXT: 2}, on(2, devices=2),                         (1, 8, "always", "flash", 1)),
    "cp, float32":         ({CONTEXT: 2, PARAM: "float32"}, on(2, devices=2),       (1, 8, "always", "efficient", 1)),
    "cp, float64":         ({CONTEXT: 2, DTYPE: "float64"}, on(2, devices=2),       (1, 8, "always", "math", 1)),
    "masked, bfloat16":    ({MASK: True, BACKEND: "efficient"}, GPU,                (1, 8, "never", "efficient", 1)),
    "windowed":            ({WINDOW: 2047}, on(1),                                  (1, 8, "never", "cpu", 1)),
    "windowed, bfloat16":  ({WINDOW: 2047}, GPU,                                    (1, 8, "never", "flash", 1)),
    "windowed, explicit":  ({WINDOW: 2047, BACKEND: "efficient"}, GPU,              (1, 8, "never", "efficient", 1)),
    "window not reached":  ({WINDOW: 2048}, GPU,                                    (1, 8, "never", "auto", 1)),
    "masked, float32":     ({MASK: True, PARAM: "float32", BACKEND: "math"}, GPU,   (1, 8, "never", "math", 1)),
    "masked, float64":     ({MASK: True, DTYPE: "float64", BACKEND: "math"}, GPU,   (1, 8, "never", "math", 1)),
    "CPU offload":         ({OFFLOAD: True}, on(1),                                 (1, 8, "always", "auto", 1)),
    "replicas":            ({REPLICATE: 2}, on(2),                                  (1, 16, "never", "auto", 1)),
    "experts":             (EXPERTS_OVER_TP, on(2),                                 (1, 8, "always", "auto", 1)),
    "experts, bfloat16":   ({**EXPERTS_OVER_TP, PARAM: "bfloat16"}, on(2),          (1, 8, "never", "auto", 1)),
    "explicit reshard":    ({RESHARD: "never"}, on(2),                              (2, 16, "never", "auto", 1)),
    "default written out": ({RESHARD: "default"}, on(2),                            (2, 16, "always", "auto", 1)),
    "tensor":              ({TENSOR: 2}, on(8),                                     (4, 32, "always", "auto", 1)),
    "context":             ({CONTEXT: 2}, on(8),                                    (4, 32, "always", "cpu", 1)),
    "context groups":      ({CONTEXT: 2, RESHARD: 4}, on(8),                        (4, 32, 4, "cpu", 1)),
    "pipeline":            ({PIPELINE: 2}, on(8),                                   (4, 32, "never", "auto", 1)),
    "pipeline, default":   ({PIPELINE: 2, RESHARD: "default"}, on(8),               (4, 32, "never", "auto", 1)),
    "pipeline, always":    ({PIPELINE: 2, RESHARD: "always"}, on(8),                (4, 32, "always", "auto", 1)),
    "all degrees":         ({PIPELINE: 2, CONTEXT: 2, TENSOR: 2, REPLICATE: 2}, on(48), (3, 48, "never", "cpu", 1)),
    "GPipe":               ({PIPELINE: 2, SCHEDULE: "GPipe"}, on(2),                (1, 8, "never", "auto", 1)),
    "1F1B":                ({PIPELINE: 2, SCHEDULE: "1F1B"}, on(2),                 (1, 8, "never", "auto", 1)),
    "Interleaved1F1B":     ({PIPELINE: 2, SCHEDULE: "Interleaved1F1B"}, on(2),      (1, 8, "never", "auto", 2)),
    "LoopedBFS":           ({PIPELINE: 2, SCHEDULE: "LoopedBFS"}, on(2),            (1, 8, "never", "auto", 2)),
    "zero bubble":         (ZERO_BUBBLE, on(2),                                     (1, 8, "never", "auto", 2)),
    "ZBVZeroBubble":       ({PIPELINE: 2, SCHEDULE: "ZBVZeroBubble"}, on(2, devices=2), (1, 8, "never", "auto", 2)),
    "DualPipeV":           ({PIPELINE: 2, SCHEDULE: "DualPipeV"}, on(2, devices=2), (1, 8, "never", "auto", 2)),
    "explicit stages":     ({PIPELINE: 2, SCHEDULE: "LoopedBFS", STAGES: 3}, on(2), (1, 8, "never", "auto", 3)),
}
# fmt: on


@pytest.mark.parametrize(
    ("settings", "launch", "values"),
    [
        pytest.param(settings, launch, dict(zip(keys, values, strict=True)), id=name)
        for keys, table in ((RESOLVED_KEYS, RESOLVED), (RESOLVED_PARALLELISM_KEYS, RESOLVED_PARALLELISM))
        for name, (settings, launch, values) in table.items()
    ],
)
def test_launch_resolves(tmp_path: Path, settings: Settings, launch: Launch, values: dict[str, Any]):
    loaded = load(tmp_path, settings)
    resolved = config.check(loaded, launch)
    assert {key: of(resolved, key) for key in values} == values
    keys = {*RESOLVED_KEYS, *RESOLVED_PARALLELISM_KEYS, "training.loss_chunks", "checkpoint.initial_load_path"}
    changed = {key.replace(".", "__"): of(resolved, key) for key in keys}
    assert resolved == loaded.config.replace(**changed)  # nothing else has changed


def test_a_switch_that_changes_what_cudnn_returns_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    loaded = load(tmp_path, {BACKEND: "cudnn"})
    assert config.check(loaded, on(1, devices=1)).training.attention_backend == "cudnn"
    monkeypatch.setenv("TORCH_CUDNN_SDPA_AVOID_RECOMPILE", "1")
    with pytest.raises(ConfigError, match=r"attention_backend = \"cudnn\": TORCH_CUDNN_SDPA_AVOID_RECOMPILE=1 changes"):
        config.check(loaded, on(1, devices=1))


SEQ_LEN, LOCAL_BATCH = "training.seq_len", "training.local_batch_size"
LLAMA_3 = {"model.vocab_size": 128_256, SEQ_LEN: 8192}
LOSS_CHUNKS = {  # settings, launch, chunks: a sequence's logits are 3.9 GiB in float32
    "small vocabulary": ({}, on(1), 1),
    "one sequence": ({**LLAMA_3, LOCAL_BATCH: 1}, on(1), 2),
    "two sequences": ({**LLAMA_3, LOCAL_BATCH: 2}, on(1), 4),
    "microbatch": ({**LLAMA_3, LOCAL_BATCH: 2, PIPELINE: 2}, on(2), 2),
    "context": ({**LLAMA_3, LOCAL_BATCH: 2, CONTEXT: 2}, on(2), 2),
    "loss parallel": ({**LLAMA_3, LOCAL_BATCH: 1, TENSOR: 4}, on(4), 1),
    "gathered logits": ({**LLAMA_3, LOCAL_BATCH: 1, TENSOR: 4, "parallelism.disable_loss_parallel": True}, on(4), 2),
    "three would be unequal": ({**LLAMA_3, SEQ_LEN: 10_240, LOCAL_BATCH: 1}, on(1), 4),
    "no equal ones": ({**LLAMA_3, SEQ_LEN: 8191, LOCAL_BATCH: 1}, on(1), 2),
    "explicit": ({**LLAMA_3, "training.loss_chunks": 1}, on(1), 1),
}


@pytest.mark.parametrize("name", LOSS_CHUNKS)
def test_logits_of_a_chunk_take_at_most_two_gibibytes(tmp_path: Path, name: str):
    settings, launch, chunks = LOSS_CHUNKS[name]
    assert config.check(load(tmp_path, settings), launch).training.loss_chunks == chunks


def test_derived_numbers(tmp_path: Path):
    settings = {PIPELINE: 2, CONTEXT: 4, ULYSSES: 2, TENSOR: 2, REPLICATE: 2, GLOBAL_BATCH: 96, MICROBATCH: 2}
    resolved = config.check(load(tmp_path, settings), on(96))
    parallelism = resolved.parallelism
    assert (parallelism.data_parallel_degree, parallelism.world_size, parallelism.ranks_per_shard) == (6, 96, 32)
    assert (parallelism.n_stages, parallelism.ring_degree) == (2, 2)
    assert (resolved.gradient_accumulation_steps, resolved.n_microbatches) == (2, 4)
    assert resolved.hidden_shape == (2 * 2048 // 8, 256)
    with pytest.raises(AttributeError, match=r"^no option training\.backend$"):
        resolved.replace(training__backend="math")


def test_launch_from_environment():
    for environment in {}, {"RANK": "", "WORLD_SIZE": ""}:
        with patch.dict(os.environ, environment, clear=True):
            assert Launch.from_environment(2) == Launch(0, 0, 1, 1, 2)
    torchrun = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}
    with patch.dict(os.environ, torchrun, clear=True):
        assert Launch.from_environment(4) == Launch(rank=5, local_rank=1, world_size=8, local_world_size=4, n_devices=4)


WRONG_NUMBERS = [
    ("RANK", "-1", ">= 0 and <= 1"),
    ("RANK", "2", ">= 0 and <= 1"),
    ("LOCAL_RANK", "1.0", ">= 0"),
    ("WORLD_SIZE", "two", ">= 1"),
    ("LOCAL_WORLD_SIZE", "0", ">= 1"),
]


@pytest.mark.parametrize(("name", "value", "limits"), WRONG_NUMBERS)
def test_wrong_torchrun_environment(name: str, value: str, limits: str):
    with patch.dict(os.environ, {"WORLD_SIZE": "2", name: value}, clear=True):
        lines = problems(lambda: Launch.from_environment(0))
    assert lines == [f'environment: {name} = "{value}": expected an integer {limits}']


# ---------------------------------------------------------------------------------------------------------------------
# Ranks of a node


@pytest.mark.parametrize(
    ("settings", "environment", "n_devices", "n_ranks"),
    [
        pytest.param({}, {}, 0, 1, id="CPU: one"),
        pytest.param({}, {}, 8, 8, id="GPUs: one each"),
        pytest.param({}, {"NGPU": "2"}, 8, 2, id="NGPU of the GPUs"),
        pytest.param({}, {"NGPU": "4"}, 0, 4, id="NGPU on a CPU"),
        pytest.param({}, {"NNODES": "2"}, 8, 8, id="two nodes"),
        pytest.param({}, {"NNODES": "2"}, 0, 1, id="two CPU nodes"),
        pytest.param({}, {"NNODES": "", "NGPU": ""}, 8, 8, id="empty is unset, as in run_train.sh"),
        pytest.param({SHARD: 4}, {}, 8, 4, id="shard degree"),
        pytest.param({SHARD: 4}, {}, 0, 4, id="shard degree on a CPU"),
        pytest.param({SHARD: 4}, {"NNODES": "2"}, 2, 2, id="shard degree over two nodes"),
        pytest.param({REPLICATE: 2}, {}, 0, 2, id="replicas on a CPU"),
        pytest.param({REPLICATE: 2}, {}, 8, 8, id="replicas on GPUs"),
        pytest.param({REPLICATE: 2, SHARD: 3}, {}, 8, 6, id="replicas and shards"),
        pytest.param({REPLICATE: 2}, {"NNODES": "2", "NGPU": "2"}, 0, 2, id="replicas, NGPU, two nodes"),
        pytest.param({TENSOR: 4}, {}, 0, 4, id="tensor on a CPU"),
        pytest.param({TENSOR: 4}, {}, 8, 8, id="tensor on GPUs"),
        pytest.param({PIPELINE: 2, CONTEXT: 2, TENSOR: 2}, {}, 0, 8, id="three degrees on a CPU"),
        pytest.param({PIPELINE: 2, CONTEXT: 2}, {"NNODES": "2"}, 0, 2, id="two degrees over two CPU nodes"),
        pytest.param({PIPELINE: 2, TENSOR: 2, SHARD: 3}, {}, 16, 12, id="two degrees and shards"),
        pytest.param({PIPELINE: 2, SHARD: 8}, {"NNODES": "2"}, 8, 8, id="a pipeline over two nodes"),
    ],
)
def test_ranks_per_node(tmp_path: Path, settings: Settings, environment: dict[str, str], n_devices: int, n_ranks: int):
    loaded, nodes = load(tmp_path, settings), int(environment.get("NNODES") or 1)
    assert launcher.ranks_per_node(loaded, environment, n_devices) == n_ranks
    assert launcher.ranks_wanted(loaded, environment, n_devices) == n_ranks * nodes


UNEVEN = "ranks cannot be divided evenly among NNODES ="
NO_LAUNCH = [
    ({SHARD: 3}, {"NNODES": "2"}, 0, [f"FILE: 3 {UNEVEN} 2 nodes"]),
    ({REPLICATE: 8}, {"NNODES": "3"}, 0, [f"FILE: 8 {UNEVEN} 3 nodes"]),
    ({CONTEXT: 3, SEQ_LEN: 12, SHARD: 3}, {"NNODES": "2"}, 0, [f"FILE: 9 {UNEVEN} 2 nodes"]),
    ({SHARD: 16}, {}, 8, [f"FILE: 16 ranks {TOO_MANY}"]),
    ({}, {"NGPU": "16"}, 8, [f"FILE: 16 ranks {TOO_MANY}"]),
    ({}, {"NGPU": "0"}, 8, ['environment: NGPU = "0": expected an integer >= 1']),
    ({}, {"NGPU": "-2"}, 8, ['environment: NGPU = "-2": expected an integer >= 1']),
    ({}, {"NNODES": "1.5"}, 8, ['environment: NNODES = "1.5": expected an integer >= 1']),
    # the launch is checked; degrees that do not divide the devices
    ({GLOBAL_BATCH: 16}, {"NGPU": "4"}, 8, {GLOBAL_BATCH: "multiple of local_batch_size x ranks = 8 x 4 = 32"}),
    ({REPLICATE: 3}, {}, 8, {REPLICATE: "replicate 3 needs a multiple of 3 ranks, and the launch has 8"}),
    ({PIPELINE: 2, TENSOR: 2}, {}, 6, {PIPELINE: "pipeline 2 x tensor 2 needs a multiple of 4 ranks"}),
    ({SHARD: 4}, {"NGPU": "3"}, 8, {SHARD: "shard 4 needs 4 ranks, and the launch has 3; start 4"}),
]


@pytest.mark.parametrize(("settings", "environment", "n_devices", "expected"), named(NO_LAUNCH))
def test_no_launch(
    tmp_path: Path, settings: Settings, environment: dict[str, str], n_devices: int, expected: list[str] | Rejected
):
    loaded = load(tmp_path, settings)

    def count() -> int:
        return launcher.ranks_per_node(loaded, environment, n_devices)

    if isinstance(expected, list):
        assert problems(count) == [line.replace("FILE", loaded.file) for line in expected]
    else:
        assert_rejected(count, settings, expected)


def test_launcher_rejects_ranks_that_the_nodes_cannot_share(tmp_path: Path):
    file = str(tmp_path / "run.toml")
    load(tmp_path, {})
    train = ("-m", "titanlite", "train", file)
    assert python(*train, f"--{SHARD}=3", NNODES="2") == (2, "", f"error: {file}: 3 {UNEVEN} 2 nodes\n")


def test_one_node_needs_no_port():
    parameters, address = agent.rendezvous({})
    assert (parameters.endpoint, parameters.get("is_host"), address) == ("localhost:0", True, "localhost")


@pytest.mark.parametrize("node", ["0", "1"])
def test_several_nodes_meet_at_the_first_which_is_told_so(node: str):
    """torch compares MASTER_ADDR with the node's own names otherwise, and waits forever where they differ."""
    nodes = {"NNODES": "2", "NODE_RANK": node, "MASTER_ADDR": "127.0.0.1"}
    parameters, address = agent.rendezvous(nodes)
    assert (parameters.endpoint, parameters.run_id) == ("127.0.0.1:29500", "titanlite")
    assert (parameters.get("is_host"), address) == (node == "0", "127.0.0.1")
    assert (parameters.min_nodes, parameters.max_nodes) == (2, 2)
    parameters, _ = agent.rendezvous({**nodes, "MASTER_PORT": "1234", "NNODES": "2:4", "JOB_ID": "7"})
    assert (parameters.endpoint, parameters.run_id) == ("127.0.0.1:1234", "7")
    assert (parameters.min_nodes, parameters.max_nodes) == (2, 4)


def test_several_nodes_need_their_addresses():
    with pytest.raises(ConfigError) as error:
        launcher.require_place({"NNODES": "1:2"})
    assert error.value.problems == [
        f"environment: {name}: expected a value where NNODES is above 1" for name in ("NODE_RANK", "MASTER_ADDR")
    ]


@pytest.mark.parametrize("nodes", ["x", "0", "3:2", "1:2:3"])
def test_wrong_numbers_of_nodes(nodes: str):
    with pytest.raises(ConfigError, match="environment: NNODES"):
        launcher.nodes_of({"NNODES": nodes})


def test_an_elastic_launch_must_fit_with_all_numbers_of_nodes(tmp_path: Path):
    elastic = {"NNODES": "1:2", "NGPU": "2"}
    assert launcher.ranks_per_node(load(tmp_path, {SHARD: -1}), elastic, 0) == 2
    with pytest.raises(ConfigError, match="needs 4 ranks, and the launch has 2"):
        launcher.ranks_per_node(load(tmp_path, {SHARD: 4}), elastic, 0)


def test_launcher_rejects_a_wrong_config(tmp_path: Path):
    file = tmp_path / "run.toml"
    file.write_text("[training]\nsteps = 0\nlr = 'é'\n", encoding="utf-8")
    lines = (
        "error: command line: --oops: expected --section.key=value\n"
        f"error: {file}: training.steps = 0: expected an integer >= 1\n"
        f'error: {file}: training.lr = "é": unknown key; did you mean optimizer.lr?\n'
        'error: command line: optimizer.lr = "high": expected a finite number > 0\n'
    )
    assert python("-m", "titanlite", "train", str(file), "--optimizer.lr=high", "--oops") == (2, "", lines)


@pytest.mark.parametrize(("limit", "rejected"), [(24, True), (255, True), (256, False), (-1, False)])
def test_a_low_limit_on_open_files_is_one_line(monkeypatch: pytest.MonkeyPatch, limit: int, rejected: bool):
    """With 24, torch's store would wait forever."""
    monkeypatch.setattr("resource.getrlimit", lambda kind: (limit, limit))
    monkeypatch.setattr("resource.setrlimit", lambda kind, limits: None)
    line = f"environment: ulimit -n = {limit}: expected at least 256 open files; raise the limit"
    if rejected:
        assert problems(launcher.raise_open_file_limit) == [line]
    else:
        launcher.raise_open_file_limit()


@pytest.mark.parametrize(("node", "limit", "rejected"), [(0, 2303, True), (0, 2304, False), (1, 256, False)])
def test_the_first_node_needs_two_connections_to_every_rank(monkeypatch, tmp_path, node, limit, rejected):
    """They are those of the watchdog and of torch. The launch of 1,024 ranks would wait forever without one."""
    monkeypatch.setattr("resource.getrlimit", lambda kind: (limit, limit))
    monkeypatch.setattr("resource.setrlimit", lambda kind, limits: None)
    for name, value in {"NNODES": 256, "NODE_RANK": node, "MASTER_ADDR": "localhost", "NGPU": 4}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr("titanlite.launch.agent.run_ranks", lambda *arguments, **options: 0)
    monkeypatch.setattr(launcher, "listen_as_launcher", lambda: None)
    arguments = ["debug", f"--job.dump_folder={tmp_path}", "--training.local_batch_size=1"]
    if rejected:
        line = f"environment: ulimit -n = {limit}: expected at least 2304 open files; raise the limit"
        assert problems(lambda: launcher.main(arguments)) == [line]
    else:
        assert launcher.main(arguments) == 0
