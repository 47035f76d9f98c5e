"""What a step costs a device that a CPU lacks, counted: bytes moved besides the work, waits for the device, compiles,
collectives that overlap. benchmarks/NOTEBOOK.md has the table."""

import contextlib
import copy
import weakref
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._functorch import partitioners
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor import config as inductor
from torch._inductor.compile_fx import compile_fx
from torch._inductor.fx_passes.post_grad import post_grad_passes
from torch._inductor.virtualized import V
from torch.distributed import _symmetric_memory
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode

from titanlite import build, config
from titanlite.build import optimizer_for
from titanlite.checkpoint.tensors import dequantized, load_quantized
from titanlite.config.schema import LRScheduler, Optimizer
from titanlite.config.stage_split import module_names
from titanlite.data.loader import Batch
from titanlite.loss import chunked_cross_entropy
from titanlite.optimizer import clip_factor, clipped_step, gradient_norm, set_lr
from titanlite.parallel import fsdp, mesh
from titanlite.parallel.activation_checkpoint import apply_activation_checkpoint
from titanlite.parallel.float8 import convert_to_float8
from titanlite.parallel.fsdp import prepare_accumulation_step
from titanlite.parallel.shards import local_shard
from titanlite.parallel.tensor import apply_tensor_parallel
from titanlite.techniques.low_bit_adam import LowBitAdam, _float32
from titanlite.tools.plan import planner
from titanlite.tools.plan.dry_run import dry_run
from titanlite.tools.plan.op_trace import Communication, Work, fake_world, recording
from titanlite.tools.plan.segments import Pass
from titanlite.torch_workarounds import NothingToReduce

CPU = torch.device("cpu")
DEBUG = "configs/debug.toml"


def resolve(*overrides: str, world_size: int = 1) -> config.Config:
    """Return the debug config as it is for a GPU: computation in bfloat16."""
    arguments = [DEBUG, "--training.mixed_precision_param=bfloat16", *overrides]
    return config.check(config.load(arguments), config.Launch(0, 0, world_size, world_size, n_devices=0))


@pytest.fixture
def alone() -> Iterator[None]:
    with fake_world(0, 1):
        yield
    mesh.forget_layouts()


# Bytes ---------------------------------------------------------------------------------------------------------------


def bytes_of_fsdp(job: config.Config, n_accumulation_steps: int = 1) -> float:
    """Return the bytes per parameter that copies and sums of a step's forwards and backwards read and write. With only
    four tokens, these are copies of weights and gradients."""
    layout = mesh.build_layout(job.parallelism, CPU)
    model = build.build_stage(job, layout, None, CPU)
    with recording() as trace:
        model.materialize(CPU)
        step = build.build_train_step(build.Run(job, layout, CPU, model, {0: model}))
        tokens = torch.zeros(1, 4, dtype=torch.int64)
        trace.mark("step")
        for accumulation_step in range(1, n_accumulation_steps + 1):
            prepare_accumulation_step(model, job.parallelism, last=accumulation_step == n_accumulation_steps)
            step.runner.forward(Batch(tokens, tokens, tokens)).backward()
    copies = [event for event in trace.segments[-1].events if isinstance(event, Work) and is_copy(event.name)]
    n_elements = sum(local_shard(parameter).numel() for parameter in model.parameters())
    return sum(work.read + work.written for work in copies) / n_elements


def is_copy(name: str) -> bool:
    operators = ("copy", "copy_", "cat", "div", "add_", "mul_")
    return name.startswith(("fsdp.", "aten._foreach")) or name.partition(".")[2].lstrip("_").endswith(operators)


@pytest.mark.parametrize(
    ("reshard", "expected"),
    [("default", 6 + 4 + 6), ("never", 6 + 4 + 6), ("always", 2 * (6 + 4) + 6)],
    ids=["default", "never", "always"],
)
def test_one_rank_pays_for_no_sharding(alone, reshard, expected):
    """A weight is cast (4 bytes read, 2 written) and copied (2 and 2), once or twice, and its gradient is cast (2 and
    4). It was 42 bytes: gathered twice, and the gradient divided by 1 (4 and 4) and copied (4 and 4)."""
    job = resolve(f"--parallelism.fsdp_reshard_after_forward={reshard}", "--training.seq_len=16")
    assert bytes_of_fsdp(job) == pytest.approx(expected, rel=0.03)


IN_BFLOAT16 = ("--training.dtype=bfloat16", "--training.seq_len=16", "--model.n_layers=2")
REDUCED_ONCE = "--parallelism.fsdp_reduce_gradients=last_accumulation_step"
IN_PLACE = {
    "reduced in bfloat16": ["--training.mixed_precision_reduce=bfloat16"],
    "reduced in bfloat16, once": ["--training.mixed_precision_reduce=bfloat16", REDUCED_ONCE],
    "reduced in float32": [],
    "always resharded": ["--parallelism.fsdp_reshard_after_forward=always"],
}


@pytest.mark.parametrize("options", IN_PLACE.values(), ids=IN_PLACE)
def test_one_rank_in_one_type_copies_nothing(alone, options):
    """Later accumulation steps add to the gradients (2 + 2 bytes read, 2 written). It was 12 bytes in the first step:
    gathered twice and copied into a buffer (4 each); reduced in float32, 20."""
    assert bytes_of_fsdp(resolve(*IN_BFLOAT16, *options), 3) == pytest.approx(2 * 6, rel=0.05)


def test_a_sum_over_accumulation_steps_in_a_wider_type_is_kept(alone):
    """The first gradient is cast (2 + 4), the others are added (2 + 4 + 4), and the sum is copied into a buffer (4 + 4)
    and cast back (4 + 2)."""
    assert bytes_of_fsdp(resolve(*IN_BFLOAT16, REDUCED_ONCE), 3) == pytest.approx(6 + 2 * 10 + 8 + 6, rel=0.03)


@pytest.mark.parametrize("axis", ["tensor_parallel", "data_parallel_replicate"])
def test_several_ranks_use_the_weights_of_one_shard_where_they_are(axis):
    """What is left is copies of gradients into a buffer (2 + 4), two passes over those of replicas, and their cast."""
    with fake_world(0, 2):
        job = resolve(*IN_BFLOAT16, f"--parallelism.{axis}_degree=2", world_size=2)
        passes = {"tensor_parallel": 6 + 6, "data_parallel_replicate": 6 + 2 * 8 + 6}[axis]
        assert bytes_of_fsdp(job) == pytest.approx(passes, rel=0.03)
    mesh.forget_layouts()


SMALL = [f"--model.{key}" for key in ("dim=32", "n_heads=2", "n_kv_heads=1", "ffn_dim=64")]
EXACT = {
    **IN_PLACE,
    "reduced in float32, once": [REDUCED_ONCE],
    "float32, reduced in bfloat16": [
        *("--training.dtype=float32", "--training.mixed_precision_param=float32"),
        "--training.mixed_precision_reduce=bfloat16",
    ],
}


@pytest.mark.parametrize("options", EXACT.values(), ids=EXACT)
def test_weights_and_gradients_in_place_are_those_of_copies(alone, monkeypatch, options):
    """Bit for bit, over two steps of three accumulation steps."""
    job, results = resolve(*IN_BFLOAT16, *SMALL, *options), []
    for use_in_place in (fsdp.use_in_place, lambda model, parallelism, training: None):
        monkeypatch.setattr(build, "use_in_place", use_in_place)
        layout = mesh.build_layout(job.parallelism, CPU)
        model, stages = build.build_model(job, layout, CPU)
        optimizer = build.build_optimizer(job, model)
        step = build.build_train_step(build.Run(job, layout, CPU, model, stages))
        generator = torch.Generator().manual_seed(0)
        tensors = []
        for _ in range(2):
            tokens = torch.randint(272, (3, 1, 16), generator=generator)
            step.forward_backward([Batch(each, each, torch.arange(16)[None]) for each in tokens])
            tensors += [local_shard(parameter.grad).clone() for parameter in model.parameters()]
            optimizer.step()
            optimizer.zero_grad()
        results.append([*tensors, *(local_shard(parameter) for parameter in model.parameters())])
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))
    assert all(tensor.count_nonzero() for tensor in results[0])


class BufferOnADevice:
    is_cuda, device = True, torch.device("cuda", 0)


def test_gradients_of_one_rank_are_kept_until_the_compute_stream_waits_for_the_stream_that_reads_them(monkeypatch):
    """fully_shard asks for the input on the compute stream, and for the output on the reduce-scatter stream."""
    compute, other = mock.Mock(), mock.Mock()
    monkeypatch.setattr(torch, "empty", lambda *size, **options: BufferOnADevice())
    # The other stream is current when fully_shard asks for an output, the compute stream when a buffer is released.
    streams = iter([other, compute, other, compute])
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: next(streams))
    reduce_scatter, options = NothingToReduce(), {"dtype": torch.float32, "device": CPU}
    buffer = reduce_scatter.allocate((4,), **options)
    assert reduce_scatter.allocate((4,), **options) is buffer
    kept = weakref.ref(buffer)
    del buffer
    assert kept() is not None
    compute.wait_stream.assert_not_called()
    reduce_scatter.allocate((4,), **options)
    compute.wait_stream.assert_called_once_with(other)
    assert kept() is None
    reduce_scatter.allocate((4,), **options)
    NothingToReduce.release()  # before the next forward
    assert compute.wait_stream.call_count == 2
    assert reduce_scatter.kept is None


def test_chunks_of_the_loss_read_and_write_the_heads_gradient_once_more_each():
    """The gradient of each chunk but the first is added in float32 (read 2 + 4, written 4), and the sum is scaled and
    cast in one operator (read 4, written 2)."""
    vocabulary, dim, n_chunks = 512, 64, 4
    x = torch.randn(8, dim, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(vocabulary, dim, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.zeros(8, dtype=torch.int64)
    with recording() as trace:
        x, weight, targets = (torch.empty_like(each, requires_grad=each.requires_grad) for each in (x, weight, targets))
        trace.mark("step")
        loss = chunked_cross_entropy(x, weight, targets, n_chunks=n_chunks, loss_parallel=True)
        (loss / 8).backward()
    size = weight.numel()
    passes = [
        (work.read // size, work.written // size)
        for work in trace.segments[-1].events
        if isinstance(work, Work) and not work.flops and work.written >= size
    ]
    assert passes == [(2, 4), *[(6, 4)] * (n_chunks - 1), (4, 2)]


# Waits for the device ------------------------------------------------------------------------------------------------

READS = ("item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "cpu")


@contextlib.contextmanager
def no_value_is_read() -> Iterator[None]:
    """Fail where Python reads a tensor's value, for which it would wait for a GPU."""

    def reads(*_: Any, **__: Any) -> None:
        raise AssertionError("the host waits for the device")

    with contextlib.ExitStack() as stack:
        for name in READS:
            stack.enter_context(mock.patch.object(Tensor, name, reads))
        yield


def test_a_read_value_is_seen():
    with no_value_is_read(), pytest.raises(AssertionError, match="waits"):
        bool(torch.ones(()).isfinite().all())


def small_model() -> nn.Module:
    """Return what an optimizer asks of a model, with a gradient of norm 64 in each of two weights."""
    model = nn.Module()
    model.tok_embeddings = None
    model.layers, model.vector = nn.ParameterList([torch.ones(64, 64)]), nn.Parameter(torch.ones(4096))
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
        parameter.grad *= 64 / parameter.grad.norm()
    return model


OPTIMIZERS = {
    "fused": Optimizer(),
    "foreach": Optimizer(implementation="foreach"),
    "int8 states": Optimizer(state_dtype="int8"),
    "int4 states": Optimizer(state_dtype="int4"),
    "float8 states": Optimizer(state_dtype="float8"),
    "states in host memory": Optimizer(enable_cpu_offload=True),
    "Muon": Optimizer(name="Muon", muon_dtype="float32"),
    "bfloat16 states": Optimizer(state_dtype="bfloat16"),
}


@pytest.mark.parametrize("name", ["fused", "int8 states", "int4 states", "float8 states", "bfloat16 states", "Muon"])
def test_clipping_and_skipping_do_not_wait(alone, name):
    model = small_model()
    optimizer = optimizer_for(model, OPTIMIZERS[name])
    optimizer.step()  # creates the states
    with no_value_is_read():
        norm = gradient_norm(model.parameters(), CPU)
        clipped_step(optimizer, clip_factor(norm, 1.0), norm.isfinite())


QUANTIZED = ["int8 states", "int4 states", "float8 states"]


def moved(name: str, gradients: Tensor, n_steps: int) -> Tensor:
    """Return how far a weight moves in so many steps with constant gradients, relative to so many times lr."""
    model, options = nn.Module(), OPTIMIZERS[name].model_copy(update={"weight_decay": 0.0})
    weight = nn.Parameter(torch.zeros_like(gradients))
    model.tok_embeddings, model.weight, model.matrix = None, weight, nn.Parameter(torch.ones(2, 2))
    optimizer = optimizer_for(model, options)
    for _ in range(n_steps):
        weight.grad = gradients.clone()
        optimizer.step()
    return weight.detach() / (n_steps * options.lr)


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("size", [1e-3, 1e-7])
def test_quantized_states_move_weights_alike_in_both_directions(name, size):
    """With constant gradients, all of a block alike, there is nothing to round but the largest value of a block."""
    signs = torch.ones(4096).masked_fill(torch.arange(4096) >= 2048, -1)  # each block has one sign
    up, down = moved(name, size * signs, 50).split(2048)
    expected = moved("fused", size * signs, 50)[0]
    torch.testing.assert_close(up, -down, rtol=1e-5, atol=0)
    torch.testing.assert_close(up, expected.expand(2048), rtol=0.02, atol=0)


@pytest.mark.parametrize("name", QUANTIZED)
def test_states_of_the_embedding_are_not_quantized(name):
    model = small_model()
    model.tok_embeddings = nn.Embedding(64, 64)
    model.tok_embeddings.weight.grad = torch.ones(64, 64)
    optimizer = optimizer_for(model, OPTIMIZERS[name])
    optimizer.step()
    of_embedding, of_layer = (optimizer.state[weight] for weight in (model.tok_embeddings.weight, model.layers[0]))
    for key in ("exp_avg", "exp_avg_sq"):
        assert (type(of_embedding[key]), of_embedding[key].dtype) == (Tensor, torch.float32)
        assert type(of_layer[key]) is not Tensor


@pytest.mark.parametrize("name", QUANTIZED)
def test_what_is_quantized_is_quantized_to_itself(name):
    """So a run that resumes under the same layout continues bit for bit."""
    model = small_model()
    optimizer = optimizer_for(model, OPTIMIZERS[name])
    for _ in range(3):
        optimizer.step()
    for state in optimizer.state.values():
        for key in ("exp_avg", "exp_avg_sq"):
            before = state[key].dequantize().clone()
            load_quantized(state[key], dequantized(state[key]), optimizer.store, is_square=key == "exp_avg_sq")
            assert torch.equal(state[key].dequantize(), before)
            assert before.abs().max() > 0


@pytest.mark.parametrize("largest", [1.0, 1e-7])
@pytest.mark.parametrize("name", QUANTIZED)
def test_a_small_exp_avg_sq_is_not_rounded_to_zero(name, largest):
    """Half of each block has a gradient 1e-4 times as large, and then none. In float32 it moves by less than lr in each
    step; if its exp_avg_sq were rounded to 0, the second step would be exp_avg / eps, up to hundreds of times lr."""
    weight = nn.Parameter(torch.zeros(4096))
    model = nn.Module()
    model.tok_embeddings, model.weight, model.matrix = None, weight, nn.Parameter(torch.ones(2, 2))
    optimizer = optimizer_for(model, OPTIMIZERS[name])
    lr = OPTIMIZERS[name].lr
    small = torch.arange(4096) % 2 == 0
    for gradient in (1e-4, 0.0):
        weight.grad = torch.full((4096,), largest).masked_fill(small, gradient * largest)
        optimizer.step()
        assert weight.isfinite().all()
        assert weight[~small].abs().min() > 0
    assert weight[small].abs().max() < 2 * lr
    assert _float32(optimizer.state[weight]["exp_avg_sq"]).min() > 0


@pytest.mark.parametrize("max_norm", [0.5, 3.0, 100.0])
def test_gradients_are_clipped_as_by_torch(max_norm):
    """A norm below max_norm leaves the gradients as they are."""
    weight, gradient = nn.Parameter(torch.zeros(3)), torch.tensor([1.0, 2.0, 2.0])
    weight.grad = gradient.clone()
    norm = torch.nn.utils.clip_grad_norm_([weight], max_norm)
    assert norm == 3
    torch.testing.assert_close(gradient * clip_factor(norm, max_norm), weight.grad)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_clipped_step_is_that_of_scaled_gradients(name):
    """Two roundings of float32 in a gradient do not change Adam's first step by more than two of its own."""
    clipped, scaled, states = small_model(), small_model(), []
    for model, factor in ((clipped, 0.25), (scaled, None)):
        optimizer = optimizer_for(model, OPTIMIZERS[name])
        if factor:
            clipped_step(optimizer, torch.tensor(factor, dtype=torch.float64), torch.tensor(True))
        else:
            for parameter in model.parameters():
                parameter.grad *= 0.25
            optimizer.step()
        found = [optimizer.state[weight] for weight in model.parameters()]
        states.append([_float32(state.get("exp_avg", state.get("momentum_buffer"))) for state in found])
    torch.testing.assert_close(*states, rtol=2**-22, atol=0)
    torch.testing.assert_close(list(clipped.parameters()), list(scaled.parameters()), rtol=2**-22, atol=0)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_that_is_not_finite_changes_nothing(name):
    """Neither weights nor states change, nor the number of steps, which later bias corrections depend on."""
    model = small_model()
    optimizer = optimizer_for(model, OPTIMIZERS[name])
    clipped_step(optimizer, torch.ones((), dtype=torch.float64), torch.tensor(True))
    before = everything(model, optimizer)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, float("nan"))
    clipped_step(optimizer, torch.full((), float("nan"), dtype=torch.float64), torch.tensor(False))
    assert all(torch.equal(x, y) for x, y in zip(before, everything(model, optimizer), strict=True))


def test_a_step_in_float64_that_is_not_finite_changes_nothing():
    """The fused step would round its factor to float32, so it takes another way."""
    model = small_model().double()
    optimizer = optimizer_for(model, Optimizer())
    before = everything(model, optimizer)
    clipped_step(optimizer, torch.ones((), dtype=torch.float64), torch.tensor(False))
    assert all(torch.equal(x, y) for x, y in zip(before, everything(model, optimizer), strict=True))
    clipped_step(optimizer, torch.ones((), dtype=torch.float64), torch.tensor(True))
    assert not torch.equal(before[0], everything(model, optimizer)[0])


def test_the_norm_of_bfloat16_gradients_is_not_rounded_to_bfloat16(alone):
    """The sum of n squares has a relative error of at most n 2^-24, and its root of half as much."""
    model, generator = small_model().bfloat16(), torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator).bfloat16()
    exact = torch.stack([parameter.grad.double().square().sum() for parameter in model.parameters()]).sum().sqrt()
    assert gradient_norm(model.parameters(), CPU).item() == pytest.approx(exact.item(), rel=4096 * 2**-25)


@pytest.mark.parametrize("name", ["Adam", "AdamW"])
def test_the_low_bit_step_is_torchs_where_states_keep_the_type_of_weights(name):
    """As they do in matrices this small. Weight decay is a gradient in Adam, and is not in AdamW."""
    models = []
    for options in ({"state_dtype": "bfloat16"}, {"implementation": "foreach"}):
        model = nn.Module()
        model.tok_embeddings = None
        model.matrix = nn.Parameter(torch.linspace(-1, 1, 64).view(8, 8))
        optimizer = optimizer_for(model, Optimizer(name=name, lr=0.1, weight_decay=0.5, **options))
        for step in range(3):
            model.matrix.grad = torch.linspace(0.1, 1, 64).view(8, 8).roll(step)
            optimizer.step()
        models.append(model.matrix.detach())
    torch.testing.assert_close(*models, rtol=0, atol=2**-20)


def test_the_learning_rate_is_set_in_every_group():
    section = Optimizer(lr=0.5)
    optimizer = optimizer_for(small_model(), section)
    lr = set_lr(optimizer, 1, section, LRScheduler(warmup_steps=10, total_steps=100))
    assert lr == pytest.approx(0.05, rel=1e-12)
    assert [group["lr"] for group in optimizer.param_groups] == [lr, lr]


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    states = [_float32(state).clone() for each in optimizer.state.values() for state in each.values()]
    return [*(parameter.detach().clone() for parameter in model.parameters()), *states]


def test_documents_stay_in_host_memory():
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    batch = Batch(tokens, tokens, tokens, tokens).to(torch.device("meta"))
    assert [field.device.type for field in batch] == ["meta", "meta", "meta", "cpu"]


# Compiles ------------------------------------------------------------------------------------------------------------


def test_the_low_bit_step_is_compiled_once():
    model, compiled = small_model(), mock.Mock(side_effect=lambda function, **_: mock.Mock(side_effect=function))
    with mock.patch.object(torch, "compile", compiled):
        optimizer = LowBitAdam([{"params": list(model.parameters())}], OPTIMIZERS["int8 states"], full_precision=[])
        for _ in range(3):
            optimizer.step()
    assert compiled.call_count == 1
    update = optimizer._update
    assert update.call_count == 3 * 2
    assert not [arg for call in update.call_args_list for arg in call.args if "DTensor" in type(arg).__name__]


@pytest.mark.parametrize("ahead", [False, True])
def test_float8_scales_computed_ahead_need_one_all_reduce(ahead):
    """Otherwise the scale of each weight is reduced whenever FSDP gathers it."""
    float8 = ["enable", "emulate", "enable_fsdp_float8_all_gather"]
    options = [f"--float8.{name}" for name in float8 + ["precompute_float8_dynamic_scale_for_fsdp"] * ahead]
    options += ["--float8.recipe=tensorwise", "--parallelism.data_parallel_shard_degree=2", "--training.seq_len=32"]
    arguments = [DEBUG, "--model.n_layers=2", "--model.vocab_size=512", *options]
    job = config.check(config.load(arguments), config.Launch(0, 0, 2, 2, n_devices=0))
    with fake_world(0, 2):
        layout = mesh.build_layout(job.parallelism, CPU)
        model, stages = build.build_model(job, layout, CPU)
        optimizer = build.build_optimizer(job, model, stages.values(), layout)
        step = build.build_train_step(build.Run(job, layout, CPU, model, stages))
        counts = []
        for _ in range(2):
            tokens = torch.zeros(1, 32, dtype=torch.int64)
            with CommDebugMode() as communication:
                step.forward_backward([Batch(tokens, tokens, tokens)])
                optimizer.step()
            counts.append(communication.get_comm_counts()[torch.ops.c10d_functional.all_reduce])
    mesh.forget_layouts()
    n_weights, n_gathers = 2 * 7, 2  # for the forward and for the backward
    assert counts[1] == (1 if ahead else n_weights * n_gathers)


# Asynchronous tensor parallel ----------------------------------------------------------------------------------------


def collectives_of_a_block(n_sequences: int, *options: str) -> list[list[torch.fx.Node]]:
    """Return the collectives of a compiled block's forward and backward on one of four tensor-parallel ranks, after
    inductor's passes (private: torch._inductor, tried on torch 2.13)."""
    graphs: list[list[torch.fx.Node]] = []

    def after_passes(graph: torch.fx.GraphModule, *_: Any, **__: Any) -> Any:
        fused = copy.deepcopy(graph)
        values = (node.meta.get("val") for node in fused.graph.nodes)
        with V.set_fake_mode(next(value.fake_mode for value in values if isinstance(value, Tensor))):
            post_grad_passes(fused, is_inference=False)
        nodes = [node for node in fused.graph.nodes if "wait_tensor" not in str(node.target)]
        graphs.append([node for node in nodes if str(node.target).startswith(("_c10d_functional", "symm_mem"))])
        return make_boxed_func(graph)

    torch._dynamo.reset()  # or the shapes of the next case are symbols
    job = config.load([DEBUG, "--model.n_layers=1", "--training.seq_len=64", *options]).config
    with fake_world(0, 4):
        tp = init_device_mesh("cpu", (4,))
        model = build.meta_model(job).to(torch.bfloat16)
        if job.float8.enable:
            linears = [name for name, each in model.named_modules() if isinstance(each, nn.Linear) and name != "output"]
            convert_to_float8(model, job.float8, linears)
        apply_tensor_parallel(model, tp)
        apply_activation_checkpoint(model, job.activation_checkpoint)
        model.materialize(CPU)
        block = torch.compile(
            model.layers["0"].forward,
            fullgraph=True,
            backend=lambda graph, inputs: compile_fx(graph, inputs, inner_compile=after_passes),
        )
        x_ND = torch.zeros(n_sequences * 64 // 4, 256, dtype=torch.bfloat16, requires_grad=True)
        # inductor looks for these collectives only where there is NCCL and symmetric memory.
        present = {"is_nccl_available": dist, "is_symm_mem_enabled_for_group": _symmetric_memory}
        with inductor.patch(_micro_pipeline_tp=True), contextlib.ExitStack() as stack:
            for name, module in present.items():
                stack.enter_context(mock.patch.object(module, name, return_value=True))
            stack.enter_context(mock.patch.object(partitioners, "has_recomputable_rng_ops", return_value=False))
            block(x_ND, model.rope[0], None).sum().backward()
    return graphs


@pytest.mark.nightly
@pytest.mark.parametrize("n_sequences", [1, 2])
def test_asynchronous_tensor_parallel_overlaps_collectives(n_sequences):
    """All of the forward's, and the backward's gathers. Its reduce-scatters add the products of several weights first,
    which inductor does not take apart. (With activations [sequences, tokens, D], none was found.)"""
    graphs = collectives_of_a_block(n_sequences)
    forward, backward = (Counter(str(node.target) for node in graph) for graph in graphs)
    gathers = {"symm_mem.fused_all_gather_matmul.default": 2}
    assert forward == gathers | {"symm_mem.fused_matmul_reduce_scatter.default": 2}
    assert backward == gathers | {"_c10d_functional.reduce_scatter_tensor.default": 2}


def products_beside(node: torch.fx.Node) -> list[tuple[str, int]]:
    """Return the kind of a collective of a graph, and how many products it overlaps with; [] of an all-reduce."""
    name = str(node.target).split(".")[1]
    if name == "fused_all_gather_matmul":
        return [("all_gather", len(node.args[1]))]
    kinds = {"all_gather": ("all_gather", 0), "reduce_scatter": ("reduce_scatter", 0)}
    kinds |= {"fused_matmul": ("reduce_scatter", 1), "fused_scaled_matmul": ("reduce_scatter", 1)}
    return [kind for prefix, kind in kinds.items() if name.startswith(prefix)]


def planned_collectives(*options: str) -> list[Counter[tuple[str, int]]]:
    """Return the same of a plan, counted, of a block's forward and backward on one of four ranks. It is the
    second of two, since the backward of the embedding counts to the first."""
    axes = ["--parallelism.tensor_parallel_degree=4", "--parallelism.enable_async_tensor_parallel", "--compile.enable"]
    arguments = [DEBUG, "--model.n_layers=2", "--training.mixed_precision_param=bfloat16", "--plan.device=h100"]
    job, *_ = planner.resolve(config.load([*arguments, *axes, *options]))
    run = dry_run(planner.config_for_dry_run(job), module_names(2), 0, pipeline_rank=0, fused=("model",))
    return [
        Counter(
            (event.name, len(event.products))
            for segment in run.phases[kind, 0]
            if segment.mark == (mark, 1)
            for event in segment.events
            if isinstance(event, Communication) and run.axes[event.group][0] == "tp" and event.name != "all_reduce"
        )
        for kind, mark in ((Pass.FORWARD, "layer F"), (Pass.BACKWARD, "layer B"))
    ]


OVERLAPPING = {
    "bfloat16": [],
    "full AC": ["--activation_checkpoint.mode=full"],
    "selective AC": ["--activation_checkpoint.mode=selective"],
    "biases": ["--model.attention_bias=qkv"],
    "float8": ["--float8.enable"],
}


@pytest.mark.nightly
@pytest.mark.parametrize("options", OVERLAPPING.values(), ids=OVERLAPPING)
def test_the_plan_overlaps_what_the_compiler_overlaps(options):
    """Under selective AC only products of weight gradients read what is gathered again. Behind a gather is a cast where
    products are in float8."""
    graphs = collectives_of_a_block(1, *options)
    compiled = [Counter(pair for node in graph for pair in products_beside(node)) for graph in graphs]
    assert planned_collectives(*options) == compiled
    assert any(n for graph in compiled for _, n in graph)
