"""The plan against closed forms, against itself with all layers, and against what a process really allocates."""

import dataclasses
import functools
import gc
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest
import torch

from tests.helpers.cases import cases
from titanlite import build, config
from titanlite.config.stage_split import module_names
from titanlite.launch import cli, launcher
from titanlite.metrics import devices
from titanlite.parallel import mesh
from titanlite.tools.parity.training_run import TrainingRun
from titanlite.tools.plan import planner, report
from titanlite.tools.plan.dry_run import fold_stage
from titanlite.tools.plan.planner import config_for_dry_run, make_plan, resolve, takes_cudnn
from titanlite.tools.plan.report import checkpoint_line, verdict
from titanlite.tools.plan.result import Plan
from titanlite.tools.plan.saving import saving
from titanlite.tools.plan.schedule import all_actions, pipeline_bubble, simulate

ROOT = Path(__file__).parents[3]
TENSOR, CONTEXT, PIPELINE, SHARD = (
    f"--parallelism.{axis}_degree=2"
    for axis in ("tensor_parallel", "context_parallel", "pipeline_parallel", "data_parallel_shard")
)


def loaded(*argv: str, file: str = "debug") -> config.LoadedConfig:
    return config.load([file, *argv])


def kinds_at_most(plan: Plan) -> dict[str, int]:
    """Return, of each kind, the most that the worst rank has at any time."""
    points = plan.worst.points
    return {kind: max(point.bytes[kind] for point in points) for kind in points[0].bytes}


TEXTBOOK = {  # GB of weights, gradients and optimizer states (2 + 2 + 8 bytes per parameter) of 7B on 4 devices
    "replicate": (84, ["data_parallel_replicate_degree=4", "data_parallel_shard_degree=1"]),
    "ZeRO-1": (42, ["fsdp_reshard_after_forward=never", "fsdp_reduce_gradients=last_accumulation_step"]),
    "ZeRO-2": (31.5, ["fsdp_reshard_after_forward=never"]),
    "ZeRO-3": (21, []),
}


@pytest.mark.nightly
@pytest.mark.parametrize(("expected", "options"), TEXTBOOK.values(), ids=TEXTBOOK)
def test_textbook_states_of_zero(expected, options):
    """arXiv:1910.02054, figure 1, with weights and gradients of 2 bytes and exp_avg and exp_avg_sq of 4. Where FSDP
    keeps weights gathered, their shards take memory besides, which the textbook does not count."""
    if "shard" not in "".join(options).replace("reshard", ""):
        options = [*options, "data_parallel_shard_degree=4"]
    plan = make_plan(
        loaded(
            *("--training.dtype=bfloat16", "--optimizer.state_dtype=float32", "--compile.enable=false"),
            *("--training.mixed_precision_reduce=bfloat16", "--training.seq_len=64", "--training.local_batch_size=1"),
            *("--training.global_batch_size=12", *(f"--parallelism.{option}" for option in options)),
            file="llama2_7b",
        )
    )
    most = kinds_at_most(plan)
    states = max(most["parameters"], most["gathered"]) + most["gradients"] + most["optimizer"]
    assert states / plan.n_parameters * 7 == pytest.approx(expected, rel=0.01)


END = ("reduce", "update")
GROUPS_OF_3 = ["--activation_checkpoint.layers_per_checkpoint=3"]
LAYOUTS = {
    "accumulation": [SHARD, "--training.global_batch_size=128"],
    "tensor, selective AC op": [TENSOR, "--activation_checkpoint.mode=selective"],
    "selective AC every 2 layers, prefetch 3": [
        *(SHARD, "--activation_checkpoint.mode=selective", "--activation_checkpoint.selective_ac_option=2"),
        *("--parallelism.fsdp_forward_prefetch=3", "--model.n_layers=26"),
    ],
    "groups of 3, full AC": [SHARD, *GROUPS_OF_3, "--activation_checkpoint.mode=full", "--model.n_layers=23"],
    "groups of 3, 1F1B": [PIPELINE, *GROUPS_OF_3, "--model.n_layers=40"],
    "ring, prefetch": [
        *(CONTEXT, "--parallelism.fsdp_forward_prefetch=2", "--parallelism.fsdp_backward_prefetch=2"),
        "--model.n_layers=12",
    ],
    "1F1B": [PIPELINE, "--model.n_layers=12"],
    "kinds of layers": [
        *(SHARD, "--model.flavor=gemma3_1b", "--model.dim=64", "--model.n_heads=4", "--model.head_dim=16"),
        *("--model.ffn_dim=96", "--model.vocab_size=272", "--training.seq_len=1024", "--model.n_layers=38"),
    ],
    "ZBV": [PIPELINE, "--parallelism.pipeline_parallel_schedule=ZBVZeroBubble", "--model.n_layers=24"],
}


@pytest.mark.nightly
@pytest.mark.parametrize("options", LAYOUTS.values(), ids=LAYOUTS)
def test_folding_layers_makes_no_difference(options):
    """The memory is the same to the byte at each moment, with two exceptions. At the end of the step, where gradients
    are freed, only those of the layers that were run are. In the weight gradient of a split backward only what these
    layers left is freed step by step, so that there the plan has more memory than a run."""
    assert_folding_makes_no_difference(loaded("--model.n_layers=10", *options))


def assert_folding_makes_no_difference(job: config.LoadedConfig) -> None:
    resolved, *_ = resolve(job)
    parallelism, n_layers = resolved.parallelism, resolved.model.n_layers
    stages = config.schema.stage_modules(resolved) if parallelism.n_stages > 1 else [module_names(n_layers)]
    assert any(fold_stage(config_for_dry_run(resolved), names).copies for names in stages), "no folding"
    folded, full = make_plan(job), make_plan(job, fold=False)
    assert [rank.peak.total for rank in folded.ranks] == [rank.peak.total for rank in full.ranks]
    both = [(one, other) for one, other in zip(folded.worst.points, full.worst.points, strict=True)]
    assert all(one.label == other.label for one, other in both)
    weight_gradients = [pair for pair in both if pair[0].label.startswith("weight gradient of")]
    assert bool(weight_gradients) == (parallelism.pipeline_parallel_schedule == "ZBVZeroBubble")
    assert all(one.total >= other.total for one, other in weight_gradients)
    exact = [pair for pair in both if pair not in weight_gradients and pair[0].label not in END]
    assert [one.total for one, _ in exact] == [other.total for _, other in exact]
    assert folded.step_seconds == pytest.approx(full.step_seconds, rel=0.02)  # the update's seconds are scaled
    assert folded.cost.flops == full.cost.flops


REAL = {
    "plain": [],
    "accumulation": ["training.global_batch_size=12"],
    "full AC": ["activation_checkpoint.mode=full"],
    "groups of 3": ["activation_checkpoint.layers_per_checkpoint=3"],
    "groups of 3, full AC": ["activation_checkpoint.layers_per_checkpoint=3", "activation_checkpoint.mode=full"],
    "chunked cross-entropy, bfloat16 optimizer states": ["training.loss_chunks=4", "optimizer.state_dtype=bfloat16"],
}


def real_peak(argv: list[str]) -> int:
    """Return the peak bytes of this process's third step, by the events of torch's allocator from the model's first
    tensor on."""
    gc.collect()  # what an earlier call left would be freed during the run
    launch = config.Launch.from_environment(n_devices=0)
    job, device = config.check(config.load(argv), launch), torch.device("cpu")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        run = TrainingRun(job, device)
        for _ in range(3):
            batch, begin = run.loader.next(), time.time_ns()
            run.step(batch)
        run.loader.close()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    current = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        current += event.nbytes()
        peak = max(peak, current) if event.start_ns() >= begin else peak
    return peak


@cases("options", REAL.values(), always=[REAL["plain"]], ids=REAL)
def test_memory_is_that_of_a_real_run(options, ranks):
    """In a single process no message has a buffer, so that only a few scalars differ."""
    argv = [
        *(str(ROOT / "configs" / "debug.toml"), "--plan.device=cpu", "--training.seq_len=64"),
        *("--training.local_batch_size=4", *(f"--{option}" for option in options)),
    ]
    measured = ranks(1).run(real_peak, argv=argv)[0]
    planned = make_plan(config.load(argv)).worst.peak.total
    assert planned == pytest.approx(measured, rel=0.005)


def test_matmuls_and_communication_are_those_of_the_formulas():
    plan = make_plan(loaded(SHARD, "--training.local_batch_size=2", "--plan.device=cpu"))
    n_layers, dim, vocabulary = 6, 256, 272
    tokens = 2 * 256
    weights = plan.n_parameters - vocabulary * dim - (2 * n_layers + 1) * dim  # norms multiply no matrix
    attention = 7 * 2 * dim * tokens * 256 // 2 * n_layers  # 2 matmuls forward, 5 backward, half of them masked
    assert sum(plan.cost.flops.values()) == 6 * weights * tokens + attention
    blocks = plan.n_parameters - 2 * vocabulary * dim - dim
    count, size = plan.cost.communication["fsdp", "all_gather"]
    # Norm and head once; blocks twice, and the embedding too, though its backward does not need it.
    assert size == 4 * (2 * blocks + 3 * vocabulary * dim + dim)
    assert count == 2 * n_layers + 3
    assert plan.cost.communication["fsdp", "reduce_scatter"] == (n_layers + 2, 4 * plan.n_parameters)


@pytest.mark.nightly
def test_tensor_parallel_communication():
    """Each attention and feed-forward has an all-gather and a reduce-scatter, in the forward and in the backward."""
    plan = make_plan(loaded(TENSOR, "--training.local_batch_size=2", "--plan.device=cpu"))
    n_layers, activation = 6, 4 * 2 * 256 * 256
    gathers, scatters = plan.cost.communication["tp", "all_gather"], plan.cost.communication["tp", "reduce_scatter"]
    # Besides the layers, forward and backward: into the head, and out of the embedding.
    assert gathers == (4 * n_layers + 2, (4 * n_layers + 2) * activation)
    assert scatters == (4 * n_layers + 2, (4 * n_layers + 2) * activation)


WIDE = [
    *("--model.flavor=llama3_8b", "--model.n_layers=2", "--training.seq_len=8192", "--training.local_batch_size=4"),
    *("--training.mixed_precision_param=bfloat16", "--compile.enable", "--parallelism.tensor_parallel_degree=8"),
]
ASYNC = "--parallelism.enable_async_tensor_parallel"


def test_async_tensor_parallel_hides_communication():
    plain, overlapped = (make_plan(loaded(*WIDE, *options)) for options in ([], [ASYNC]))
    size = 4 * 8192 * 4096 * 2
    names = {"all_gather": 10, "reduce_scatter": 10, "all_gather, overlapped": 0, "reduce_scatter, overlapped": 0}
    for plan, counts in (plain, names.values()), (overlapped, (2, 6, 8, 4)):
        found = {name: amounts for (axis, name), amounts in plan.cost.communication.items() if axis == "tp"}
        assert [found.get(name, (0, 0)) for name in names] == [(n, n * size) for n in counts]
    assert overlapped.cost.flops == plain.cost.flops
    exposed = [report.time_shares(plan)["exposed communication"] for plan in (plain, overlapped)]
    assert exposed[1] < exposed[0]
    assert exposed[0] - exposed[1] < overlapped.cost.seconds["overlapped"] + 1e-9, "more is gone than was hidden"
    assert overlapped.cost.seconds["matmul"] > plain.cost.seconds["matmul"], "products of fewer rows are slower"
    assert overlapped.step_seconds < plain.step_seconds
    assert overlapped.worst.overhead == {**plain.worst.overhead, "symmetric memory": 2 * size // 8}
    lines = [[str(part) for part in report.report(plan, "").renderables] for plan in (plain, overlapped)]
    assert [any("no GPU has run it" in part for part in parts) for parts in lines] == [False, True]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--plan.devices_per_node=4"], "8 ranks on several nodes share no memory; set false"),
        (["--plan.device=cpu"], "needs CUDA"),
    ],
    ids=str,
)
def test_async_tensor_parallel_that_cannot_run_is_rejected(options, expected):
    with pytest.raises(config.ConfigError, match=expected):
        resolve(loaded(*WIDE, ASYNC, *options))
    resolve(loaded(*WIDE, *options))


def test_async_is_nothing_to_one_tensor_parallel_rank():
    options = [
        "--training.mixed_precision_param=bfloat16",
        "--compile.enable",
        SHARD,
        "--parallelism.tensor_parallel_degree=1",
    ]
    plain, overlapped = (make_plan(loaded(*options, *each)) for each in ([], [ASYNC]))
    assert overlapped.cost == plain.cost
    assert overlapped.step_seconds == plain.step_seconds
    assert overlapped.worst == plain.worst


@pytest.mark.parametrize(("schedule", "per_rank"), [("GPipe", 1), ("1F1B", 1), ("Interleaved1F1B", 2)])
def test_simulated_bubble_is_the_formula(schedule, per_rank):
    n_ranks, n_microbatches = 4, 8
    actions = all_actions(schedule, n_ranks, n_ranks * per_rank, n_microbatches)
    spans = simulate(actions, n_ranks * per_rank, lambda action: {"F": 1.0, "B": 2.0}[action.kind])
    assert pipeline_bubble(spans) == pytest.approx((n_ranks - 1) / (per_rank * n_microbatches + n_ranks - 1))


def test_messages_take_time():
    actions = all_actions("1F1B", 4, 4, 8)
    ends = [
        max(span.end for rank in simulate(actions, 4, lambda _: 1.0, message) for span in rank)
        for message in (0.0, 0.5)
    ]
    assert ends[1] > ends[0] + 2 * 3 * 0.5 - 1e-9  # to the last rank and back at least


def test_under_1f1b_a_rank_waits_for_what_it_sends():
    """Two ranks, two microbatches, actions of a second and messages of a quarter."""
    actions = all_actions("1F1B", 2, 2, 2)
    free, blocked = (simulate(actions, 2, lambda _: 1.0, 0.25, sends_block=blocks) for blocks in (False, True))
    assert [span.start for span in free[0]] == [0, 1, 3.5, 5.5]
    # Rank 0 sends after each of its forwards, rank 1 after each of its backwards.
    assert [span.start for span in blocked[0]] == [0, 1.25, 3.5, 5.75]
    assert [span.start for span in blocked[1]] == [1.25, 2.25, 3.5, 4.5]


@pytest.mark.nightly
def test_settings_that_save_memory_do():
    @functools.cache
    def peak(*options: str) -> int:
        return make_plan(loaded("--training.seq_len=512", *options)).worst.peak.total

    assert peak("--activation_checkpoint.mode=full") < peak("--activation_checkpoint.mode=selective") < peak()
    assert peak("--compile.enable") < peak()
    assert peak("--compile.enable") < peak("--compile.enable", '--compile.components=["loss"]') < peak()


SELECTIVE, COMPILED = "--activation_checkpoint.mode=selective", "--compile.enable"
SAVED = {  # options; what a layer saves of each token: numbers in bfloat16 of the model's and of the feed-forward's
    # width besides those of attention, and numbers in float32 besides its log-sum-exp
    "no AC": ([], 4, 4, 2),  # inputs and outputs of norms and their scales, outputs of w1 and w3, silu, its product
    "no AC, compiled": ([COMPILED], 4, 3, 2),  # silu is computed again
    "selective AC": ([SELECTIVE], 3, 2, 0),  # the layer's input, outputs of wo and w2, and of w1 and w3
    "selective AC, compiled": ([SELECTIVE, COMPILED], 2, 2, 0),  # no backward reads w2's output
}


@pytest.mark.parametrize(("options", "of_model", "of_feed_forward", "in_float32"), SAVED.values(), ids=SAVED)
def test_what_a_layer_saves_for_its_backward(options, of_model, of_feed_forward, in_float32):
    plan = make_plan(loaded("--plan.device=h100", *options))
    model, tokens = plan.config.model, plan.config.training.local_batch_size * plan.config.training.seq_len
    points = reversed(plan.worst.points)  # of equal labels the first microbatch's counts
    after = {point.label: point.bytes["activations"] for point in points}
    saved = [after[label] for label in after if "forward" in label and label.endswith(("layer 3", "layer 4"))]
    channels = (2 * model.n_heads + 2 * model.n_kv_heads) * model.head_dim  # q, k, v and attention's output
    numbers = of_model * model.dim + of_feed_forward * model.ffn_dim + channels
    assert abs(saved[1] - saved[0]) == tokens * (2 * numbers + 4 * (model.n_heads + in_float32))


FLASH, CUDNN = (f"--training.attention_backend={name}" for name in ("flash", "cudnn"))


@pytest.mark.parametrize(
    ("device", "options", "expected"),
    [
        *((device, [], True) for device in ("h100", "h200", "gh200", "b200", "gb200")),
        *((device, [], False) for device in ("a100_80", "l40s", "rtx_4090", "mi300x", "cpu")),
        *(("h100", [f"--model.head_dim={channels}"], True) for channels in (136, 192, 256)),
        *(("h100", [f"--model.head_dim={channels}"], False) for channels in (20, 264)),
        ("b200", ["--model.head_dim=128"], True),
        *(("b200", [f"--model.head_dim={channels}"], False) for channels in (20, 136)),
        ("h100", ["--training.mixed_precision_param=float16"], True),
        ("h100", ["--training.mixed_precision_param=float32"], False),
        ("h100", ["--training.dtype=float64"], False),
        ("h100", ["--debug.deterministic"], False),
        ("h100", ["--training.document_mask"], False),
        ("h100", [CONTEXT], False),
        ("h100", [FLASH], False),
        ("a100_80", [CUDNN], True),
    ],
)
def test_torch_takes_cudnn_where_it_prefers_it(device, options, expected):
    """verification/null_cuda compares the choices with torch's own."""
    config, device, _ = resolve(loaded(*options, f"--plan.device={device}"))
    assert takes_cudnn(config, device) == expected


def test_attention_is_planned_at_the_rate_of_what_torch_takes():
    """cuDNN on an H100 and flash on an A100, which save the same and share a dry run."""
    cache = {}
    h100, a100 = (make_plan(loaded(f"--plan.device={device}"), cache=cache) for device in ("h100", "a100_80"))
    assert len(cache) == 1
    cudnn, flash = (make_plan(loaded("--plan.device=h100", backend)) for backend in (CUDNN, FLASH))
    assert h100.cost.seconds["attention"] == cudnn.cost.seconds["attention"] < flash.cost.seconds["attention"]
    assert [point.bytes for point in cudnn.worst.points] == [point.bytes for point in flash.worst.points]
    assert a100.step_seconds == make_plan(loaded("--plan.device=a100_80", FLASH)).step_seconds


def test_a_compiled_loss_saves_logits_in_bfloat16_instead_of_their_log_softmax():
    """And the gradient takes their memory, as inductor's does."""
    plan = make_plan(loaded("--plan.device=h100", COMPILED, "--training.loss_chunks=1"))
    tokens = plan.config.training.local_batch_size * plan.config.training.seq_len
    assert max(point.bytes["logits"] for point in plan.worst.points) == 2 * tokens * plan.config.model.vocab_size


@pytest.mark.nightly
def test_offloaded_states_are_in_host_memory():
    off = make_plan(loaded("--training.enable_cpu_offload"))
    on = make_plan(loaded())
    states = sum(kinds_at_most(on)[kind] for kind in ("parameters", "optimizer"))
    assert sum(off.worst.offloaded.values()) >= states
    assert off.worst.peak.total <= on.worst.peak.total - states


OFFLOAD = "--training.enable_cpu_offload"


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_cpu_offload_copies_each_shard_that_is_gathered_and_each_gradient(dtype):
    options = ["--plan.device=h100", f"--training.dtype={dtype}", OFFLOAD]
    traffic = make_plan(loaded(SHARD, *options)).cost.communication
    itemsize, n_ranks = {"float32": 4, "bfloat16": 2}[dtype], 2
    weights, gradients = traffic["fsdp", "all_gather"][1] // 2, traffic["fsdp", "reduce_scatter"][1] // 4
    assert traffic["host", "copy to device"][1] == weights * itemsize // n_ranks
    assert traffic["host", "copy to host"][1] == gradients * itemsize // n_ranks
    alone = make_plan(loaded(*options), world_size=1).cost.communication  # no collective
    assert alone["host", "copy to device"][1] == n_ranks * traffic["host", "copy to device"][1]
    assert alone["host", "copy to host"][1] == n_ranks * traffic["host", "copy to host"][1]


@pytest.mark.nightly
@pytest.mark.parametrize("options", [[SHARD], [PIPELINE], [SHARD, "--compile.enable"]], ids=str)
def test_cpu_offload_takes_time(options):
    plans = [make_plan(loaded(*options, "--plan.device=h100", *offload)) for offload in ([], [OFFLOAD])]
    assert plans[1].step_seconds > plans[0].step_seconds
    assert plans[1].cost.seconds["optimizer"] > 0 == plans[0].cost.seconds["optimizer"]
    assert plans[1].spread["offload"][1] > 0 == plans[0].spread["offload"][1]


@pytest.mark.nightly
def test_a_checkpoint_s_size_and_the_seconds_of_a_save():
    plan = make_plan(loaded(SHARD, "--plan.device=h100"))
    h100 = plan.device.model_copy(update={"host_bandwidth": 1e9, "storage_bandwidth": 1e6, "measured": None})
    size = plan.n_parameters * 12  # a weight and two states in float32
    expected = size / 2 / 1e6  # two nodes of one device
    found = saving(plan.config, h100, world_size=2, devices_per_node=1)
    assert found[:3] == (size, size / 2 / (0.86 * 1e9), (expected, expected, expected))
    usual = saving(plan.config, plan.device, 2, 1).write_seconds
    assert usual == pytest.approx((size / 2 / 2e9, size / 2 / 6.4e9, size / 2 / 0.5e9))
    assert " to " in checkpoint_line(plan)
    assert " to " not in checkpoint_line(dataclasses.replace(plan, device=h100))
    for states in ("int8", "int4", "float8"):
        narrow = plan.config.replace(training__dtype="bfloat16", optimizer__state_dtype=states)
        assert saving(narrow, h100, 2, 1).size == plan.n_parameters * 10


@pytest.mark.parametrize("replicas", [1, 2])
def test_the_first_asynchronous_save_pins_a_block_for_each_slice(replicas):
    """On two ranks of a node. Blocks are powers of two: of the 768 rows of a feed-forward's matrix 1,024, of the 272 of
    the vocabulary 512; norms and all other matrices have powers of two already. Replicas save in turn."""
    mode, replicate = "--checkpoint.async_mode=async", f"--parallelism.data_parallel_replicate_degree={replicas}"
    plan = make_plan(loaded(mode, replicate, "--checkpoint.enable", "--plan.device=h100"), world_size=2)
    dim, layers, attention = 256, 6, 256 * (2 * 256 + 2 * 128)  # wq and wo, wk and wv
    elements = 2 * 512 * dim + layers * (attention + 3 * 1024 * dim + 2 * dim) + dim
    pinned = saving(plan.config, plan.device, 2, 8).pinned
    assert pinned == pytest.approx(12 * elements)  # a weight and two states in float32
    line = checkpoint_line(plan)
    assert f"; the first for {pinned / 2.8e9:,.0f} s " in line
    assert line.endswith(f", pinning {pinned / 2**30:,.1f} GiB of each node")
    for others in ({"checkpoint__async_mode": "disabled"}, {"training__enable_cpu_offload": True}):
        assert "pinning" not in checkpoint_line(dataclasses.replace(plan, config=plan.config.replace(**others)))


@pytest.mark.nightly
def test_optimizer_states_in_host_memory():
    h100, offload = "--plan.device=h100", "--optimizer.enable_cpu_offload"
    usual, plan = make_plan(loaded(SHARD, h100)), make_plan(loaded(SHARD, h100, offload))
    rank_bytes = 4 * plan.n_parameters / 2
    assert plan.worst.offloaded == {"optimizer": usual.worst.points[0].bytes["optimizer"]}
    assert all(point.bytes["optimizer"] == 0 for point in plan.worst.points)
    assert plan.worst.points[0].bytes["parameters"] == usual.worst.points[0].bytes["parameters"] > 0
    to_host, to_device = (plan.cost.communication["host", f"copy to {x}"][1] for x in ("host", "device"))
    assert (to_host, to_device) == (pytest.approx(2 * rank_bytes), pytest.approx(rank_bytes))
    assert plan.update_seconds > usual.update_seconds
    on_cpu = make_plan(loaded(SHARD, "--plan.device=cpu", offload))
    assert on_cpu.step_seconds == make_plan(loaded(SHARD, "--plan.device=cpu")).step_seconds


MUON, SHARD_4 = "--optimizer.name=Muon", "--parallelism.data_parallel_shard_degree=4"


@pytest.mark.nightly
def test_muon_s_work_is_that_of_the_rank_with_the_most_of_it():
    """42 matrices of 6 layers on 4 ranks are 11 rounds: 5 of w1, w2, w3 (18), the sixth of two of them with two of wq
    and wo (12), ..., of which the first rank has the most work."""
    adamw, plan = (make_plan(loaded("--plan.device=h100", *x, SHARD_4)) for x in ([], [MUON]))
    model = plan.config.model
    assert plan.cost.communication["fsdp", "all_to_all"][0] == 2 * 11
    matrices = 3 * [(model.ffn_dim, model.dim)] + 2 * [(model.dim, model.dim)] + 2 * [(model.dim // 2, model.dim)]
    shapes = sorted((min(x), max(x)) for x in matrices * model.n_layers)[::-1]
    first = sorted(shapes, key=lambda x: -(x[0] ** 2) * x[1])[::4]
    flops = sum(5 * (4 * rows * rows * columns + 2 * rows**3) for rows, columns in first)
    assert plan.cost.flops["bf16"] - adamw.cost.flops["bf16"] == flops
    assert plan.cost.communication["fsdp", "all_to_all"][1] == 2 * 2 * sum(rows * columns for rows, columns in first)
    n_matrix = sum(rows * columns for rows, columns in shapes)
    one_state_and_a_step_counter = 4 * n_matrix / 4 + 4 * len(shapes)
    states = [x.worst.points[0].bytes["optimizer"] for x in (adamw, plan)]
    assert states[0] - states[1] == one_state_and_a_step_counter
    sizes = [saving(x.config, x.device, 4, 8).size for x in (adamw, plan)]
    assert sizes[0] - sizes[1] == 4 * n_matrix


@pytest.mark.nightly
@pytest.mark.parametrize("context", [[], ["--parallelism.context_parallel_degree=2"]], ids=["", "cp"])
def test_qk_clip_has_one_more_product_of_queries_and_keys(context):
    """Of each query with half of its sequence's keys, 2 operations for each channel."""
    options = ["--plan.device=h100", MUON, SHARD, *context]
    plain, plan = (make_plan(loaded(*options, *x)) for x in ([], ["--optimizer.qk_clip_threshold=100"]))
    training, model = plan.config.training, plan.config.model
    tokens = training.local_batch_size * training.seq_len // plan.config.parallelism.context_parallel_degree
    flops = model.n_layers * tokens * training.seq_len * model.n_heads * model.head_dim
    assert plan.cost.flops["bf16"] - plain.cost.flops["bf16"] == flops


@cases("options", [[], [MUON], ["--optimizer.state_dtype=int8"]], always=[[]], ids=str)
def test_an_average_of_the_weights_is_planned(options):
    """Its memory is that of the weights in float32, each shard once, and a step reads and writes it."""
    plain, plan = (make_plan(loaded("--plan.device=h100", SHARD_4, *options, *x)) for x in ([], ["--ema.decay=0.99"]))
    states = [x.worst.points[0].bytes["optimizer"] for x in (plain, plan)]
    one_count = 4
    assert states[1] - states[0] == 4 * plan.n_parameters / 4 + one_count
    sizes = [saving(x.config, x.device, 4, 8).size for x in (plain, plan)]
    assert sizes[1] - sizes[0] == 4 * plan.n_parameters
    assert plan.cost.seconds["memory"] > plain.cost.seconds["memory"]
    assert plan.cost.communication == plain.cost.communication


@pytest.mark.nightly
def test_muon_s_plan_does_not_depend_on_folding():
    folded, full = (
        make_plan(loaded("--plan.device=h100", MUON, SHARD, "--model.n_layers=24"), fold=fold) for fold in (True, False)
    )
    assert folded.step_seconds == pytest.approx(full.step_seconds, rel=0.01)
    assert folded.cost.communication["fsdp", "all_to_all"] == full.cost.communication["fsdp", "all_to_all"]


@pytest.mark.nightly
@pytest.mark.parametrize("options", [[SHARD], [PIPELINE], [SHARD, MUON]], ids=str)
def test_a_step_frees_what_it_allocates(options):
    points = make_plan(loaded(*options, "--plan.device=cpu"), fold=False).worst.points
    left = {kind: points[-1].bytes[kind] - size for kind, size in points[0].bytes.items()}
    assert all(abs(size) < 100 for size in left.values()), left  # a scalar or two


def run_command(*argv: str) -> subprocess.CompletedProcess:
    program, environment = [sys.executable, "-m", "titanlite"], {**os.environ, "COLUMNS": "120"}
    return subprocess.run([*program, *argv], capture_output=True, text=True, cwd=ROOT, env=environment)


@pytest.mark.nightly
def test_a_config_that_cannot_run_is_rejected_with_the_lines_of_train():
    options = ["--parallelism.tensor_parallel_degree=3", "--optimizer.lr=-1", "--training.sequence=12"]
    planned, trained = (run_command(name, "configs/debug.toml", *options) for name in ("plan", "train"))
    assert planned.returncode == trained.returncode == 2
    assert planned.stderr == trained.stderr
    assert "tensor_parallel_degree = 3" in planned.stderr


def test_a_plan_says_how_many_devices_it_assumes(monkeypatch, capsys):
    note = "planned for 8 devices; set parallelism.data_parallel_shard_degree for another number"
    rejected = "--training.local_batch_size=8", "--training.global_batch_size=16"
    assert cli.run_command("plan", [str(ROOT / "configs" / "debug.toml"), *rejected]) == 2
    problem = "training.global_batch_size = 16: expected a multiple of local_batch_size x ranks = 8 x 8 = 64"
    assert capsys.readouterr().err == f"error: command line: {problem}; {note}\n"
    planned = lambda loaded, show_progress: mock.Mock(world_size=resolve(loaded)[2])  # noqa: E731
    monkeypatch.setattr(planner, "make_plan", planned)
    monkeypatch.setattr(report, "verdict", lambda plan: (True, ""))
    for option, expected in {"--training.steps=9": f"{note}\n", SHARD: ""}.items():
        monkeypatch.setattr(report, "print_report", lambda *_: print("report"))
        assert cli.run_command("plan", [str(ROOT / "configs" / "debug.toml"), option]) == 0
        assert capsys.readouterr().out.startswith(f"{expected}report\n")


@pytest.mark.nightly
def test_command():
    done = run_command("plan", "configs/debug_pp.toml", "--plan.tokens=1000000", "--plan.price=2")
    assert done.returncode == 0, done.stderr
    assert re.search(r"fits: \d+\.\d of 79\.2 GiB on pipeline rank \d", done.stdout)
    words = ("activations", "communication per rank", "matrix multiplication", "tokens/s per device", "MFU")
    assert [word for word in (*words, "device-hours", "MWh") if word not in done.stdout] == []
    assert not re.search("Traceback|Warning|warn", done.stderr), done.stderr


@pytest.mark.nightly
def test_what_does_not_fit_says_so():
    options = ("--model.flavor=llama3_8b", "--training.seq_len=65536", "--training.local_batch_size=1")
    plan = make_plan(loaded(*options, "--plan.device=rtx_4090"))
    fits, line = verdict(plan)
    assert not fits
    assert line.startswith("does NOT fit")
    assert cli.run_command("plan", [str(ROOT / "configs" / "debug.toml"), *options, "--plan.device=rtx_4090"]) == 1


@pytest.mark.nightly
def test_a_users_own_device(tmp_path):
    text = (
        "bf16 = 1e15\nfp8 = 0.0\nfp32 = 1e14\nmemory = 1e11\nmemory_bandwidth = 1e12\n"
        "interconnect_bandwidth = 1e11\nnetwork_bandwidth = 1e10\nwatts = 100.0\ndevices_per_node = 4\n"
        "source = 'mine'\n"
    )
    (tmp_path / "mine.toml").write_text(text)
    plan = make_plan(loaded(f"--plan.device={tmp_path / 'mine.toml'}"))
    assert plan.device.source == "mine"
    assert plan.world_size == 4
    for right, wrong in ("watts", "volts"), ("1e12", "-1.0"), ("devices_per_node = 4", "devices_per_node = '4'"):
        text = text.replace(right, wrong)
    (tmp_path / "mine.toml").write_text(text)
    with pytest.raises(config.ConfigError) as error:
        make_plan(loaded(f"--plan.device={tmp_path / 'mine.toml'}"))
    assert [problem.partition("mine.toml: ")[2] for problem in error.value.problems] == [
        "memory_bandwidth = -1.0: expected a finite number >= 1e-18",
        "missing key watts: expected a finite number >= 1e-18",
        'devices_per_node = "4": expected an integer >= 1',
        f"unknown key volts; expected {', '.join(devices.Device.model_fields)}",
    ]
    with pytest.raises(config.ConfigError, match="no such file"):
        make_plan(loaded(f"--plan.device={tmp_path / 'yours.toml'}"))
    with pytest.raises(config.ConfigError, match="expected one of a100_40"):
        make_plan(loaded("--plan.device=h300"))


@pytest.mark.parametrize(
    ("reported", "name"),
    [
        ("NVIDIA A100-SXM4-40GB", "a100_40"),
        ("NVIDIA A100-SXM4-80GB", "a100_80"),
        ("NVIDIA H100 PCIe", "h100_pcie"),
        ("NVIDIA H100 NVL", "h100_nvl"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA GH200 144G HBM3e", "gh200"),
        ("NVIDIA H200 NVL", "h200_nvl"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA B200", "b200"),
    ],
)
def test_a_gpu_is_found_by_the_name_that_it_reports(reported, name):
    assert devices.find_by_gpu_name(reported) is devices.DEVICES[name]


def test_an_unknown_gpu_has_no_data_sheet():
    assert devices.find_by_gpu_name("NVIDIA T4") is None


def test_a_node_without_devices_is_told_of_the_plan(monkeypatch):
    gib = 2**30
    monkeypatch.setattr(os, "sysconf", {"SC_PHYS_PAGES": 16 * gib // 4096, "SC_PAGE_SIZE": 4096}.__getitem__)
    with pytest.raises(config.ConfigError) as error:
        launcher.ranks_per_node(loaded(file="70b"), {}, n_devices=0)
    (line,) = error.value.problems
    assert "needs 64 devices, and this node has none" in line
    assert "16 GiB" in line
    assert "394 GiB" in line
    assert "titanlite plan" in line
    assert "70b.toml" in line
    assert launcher.ranks_per_node(loaded(file="debug_tp"), {}, n_devices=0) == 2


def test_parameters_are_counted_without_torch():
    for flavor in ("debug", "llama3_1b", "llama3_70b"):
        job = loaded(f"--model.flavor={flavor}").config
        assert config.schema.count_parameters(job.model) == sum(build.parameter_sizes(job).values())


@pytest.mark.nightly
def test_axes_have_the_ranks_of_the_mesh():
    plan = make_plan(loaded(PIPELINE, TENSOR, SHARD, "--plan.devices_per_node=4"))
    assert {axis: plan.axes[axis] for axis in ("pp", "fsdp", "tp")} == {"pp": [0, 4], "fsdp": [0, 2], "tp": [0, 1]}
    assert plan.axis_size("pp") == (2, 2)
    assert plan.axis_size("fsdp") == (2, 1)
    assert mesh.AXES[0] == "pp"
