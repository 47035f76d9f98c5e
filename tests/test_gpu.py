"""Tests that need a CUDA device, and a few that need two: `pytest -m gpu`. The other tests run the same code on a CPU,
except for CUDA's attention backends."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from titanlite import config
from titanlite.metrics.logger import PeakFlops
from titanlite.model import Documents
from titanlite.parallel import mesh
from titanlite.parallel.attention import ATTENTION_BACKENDS, PACKED_ATTENTION
from titanlite.parallel.tiled_attention import TiledAttention
from titanlite.techniques.low_precision import PRODUCTS
from titanlite.tools.parity.compare import FLOAT64_TOLERANCE, differences
from titanlite.tools.parity.reference import run_reference
from titanlite.tools.parity.training_run import TrainingRun, run_layout

ROOT = Path(__file__).parents[1]
DEVICE = torch.device("cuda", 0)
LOSS = "loss_metrics/global_avg_loss"
pytestmark = pytest.mark.gpu

CONFIG = """
[model]
dim = 256
n_layers = 2
n_heads = 4
n_kv_heads = 2
ffn_dim = 512

[training]
seq_len = 256
local_batch_size = 4
global_batch_size = 8
steps = 6

[optimizer]
lr = 1e-3

[lr_scheduler]
warmup_steps = 2

[metrics]
log_freq = 1
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "gpu.toml").write_text(CONFIG)
    return tmp_path


def train(folder: Path, run: str, *arguments: str) -> list[dict[str, float]]:
    common = [f"--job.dump_folder={folder / run}", f"--training.cache_folder={folder / 'cache'}"]
    command = [sys.executable, "train.py", str(folder / "gpu.toml"), *common, *arguments]
    subprocess.run(command, cwd=ROOT, check=True, timeout=240)
    return [json.loads(line) for line in (folder / run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def alone() -> Iterator[config.Launch]:
    """Start a process group of this process alone."""
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield config.Launch(0, 0, 1, 1, 1)
    dist.destroy_process_group()
    mesh.forget_layouts()  # their groups were destroyed


@pytest.mark.parametrize("option", ["enable_cpu_offload=false", "enable_cpu_offload=true", "document_mask=true"])
def test_equals_the_single_process_reference_in_float64(folder, alone, option):
    """One rank with NCCL, FSDP, gradient accumulation and clipping equals plain tensors on the same device."""
    arguments = ["--training.dtype=float64", f"--training.{option}"]
    job = config.check(config.load([str(folder / "gpu.toml"), *arguments]), alone)
    assert job.training.attention_backend == ("math" if job.training.document_mask else "auto")
    found = differences(run_reference(job, DEVICE, steps=3), run_layout(job, alone, steps=3))
    assert {name: d for name, d in found.items() if d > FLOAT64_TOLERANCE} == {}


@pytest.mark.parametrize("option", ["document_mask=false", "document_mask=true"])
def test_bfloat16_is_the_default_and_trains(folder, option):
    steps = train(folder, "run", f"--training.{option}")
    resolved = (folder / "run" / "config.toml").read_text()
    assert 'mixed_precision_param = "bfloat16"' in resolved
    assert f'attention_backend = "{"flash" if option == "document_mask=true" else "auto"}"' in resolved
    assert steps[-1][LOSS] < steps[0][LOSS] - 0.5
    assert 0 < steps[-1]["memory/max_active(GiB)"] <= steps[-1]["memory/max_reserved(GiB)"]


def test_compiled_trains_as_eager_does(folder, monkeypatch):
    """bfloat16 rounds to 2^-9, and inductor rounds fused operators at fewer places. Over the 2048 tokens of a step such
    errors average to some 5.6 x 2^-9 / sqrt(2048) = 2.4e-4 of the loss (2e-4 between inductor and eager on a CPU). The
    tolerance is eight times that."""
    eager = train(folder, "eager", "--training.steps=3")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder / "inductor"))
    compiled = train(folder, "compiled", "--training.steps=3", "--compile.enable")
    assert any((folder / "inductor").rglob("*.py")), "inductor has generated no code"
    assert len(eager) == 3
    assert eager[-1][LOSS] < eager[0][LOSS] - 0.5
    assert [values[LOSS] for values in compiled] == pytest.approx([values[LOSS] for values in eager], rel=0, abs=2e-3)


@pytest.mark.parametrize(
    "options", [[], ["--compile.enable"], ["--activation_checkpoint.mode=full"], ["--training.document_mask"]], ids=str
)
def test_a_step_does_not_synchronize_with_the_device(folder, alone, options):
    """A step synchronizes once, when train.py reads its loss, which is not part of this: see docs/architecture.md."""
    job = config.check(config.load([str(folder / "gpu.toml"), *options]), alone)
    run = TrainingRun(job, DEVICE)
    try:
        for step in range(4):
            batch = run.loader.next()
            if step == 2:  # after the first allocations and compilations
                torch.cuda.set_sync_debug_mode("error")
            run.step(batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
        run.loader.close()


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "mxfp8", "int8"])
def test_8_bit_products_train_as_bfloat16_does(folder, recipe):
    needed = {"mxfp8": (10, 0), "int8": (8, 0)}.get(recipe, (8, 9))
    if torch.cuda.get_device_capability() < needed:
        pytest.skip(f"needs compute capability {needed[0]}.{needed[1]}")
    plain = train(folder, "plain")
    options = ["--int8.enable"] if recipe == "int8" else ["--float8.enable", f"--float8.recipe={recipe}"]
    rounded = train(folder, recipe, *options)
    assert rounded[-1][LOSS] < rounded[0][LOSS] - 0.5
    assert rounded[-1][LOSS] != plain[-1][LOSS]
    assert [values[LOSS] for values in rounded] == pytest.approx([values[LOSS] for values in plain], rel=0.02)


@pytest.mark.parametrize(
    ("kind", "emulated", "needed"), [("mxfp8", "mxfp8, emulated", (10, 0)), ("int8", "int8", (8, 0))]
)
@pytest.mark.parametrize("n_tokens", [1, 17, 64, 250])
def test_8_bit_products_are_those_of_a_cpu(kind, emulated, needed, n_tokens):
    """Of few tokens, as when text is generated, and of numbers of tokens that are in no multiple of a block."""
    if torch.cuda.get_device_capability() < needed:
        pytest.skip(f"needs compute capability {needed[0]}.{needed[1]}")
    generator = torch.Generator().manual_seed(0)
    operands = [torch.randn(rows, 96, generator=generator).bfloat16() for rows in (n_tokens, 64)]
    operands += [torch.randn(rows, n_tokens, generator=generator).bfloat16() for rows in (64, 96)]
    for left, right in (operands[:2], operands[2:]):
        expected = PRODUCTS[emulated](left, right).float()
        actual = PRODUCTS[kind](left.cuda(), right.cuda()).cpu().float()
        assert (actual - expected).norm() < 0.01 * expected.norm()  # the emulation sums operands in bfloat16


def test_optimizer_states_in_host_memory_train_as_on_the_device(folder):
    """Both are torch's fused Adam in float32. Some 4 bytes per value of exp_avg and of exp_avg_sq leave the device."""
    plain = train(folder, "plain")
    offloaded = train(folder, "run", "--optimizer.enable_cpu_offload")
    assert [values[LOSS] for values in offloaded] == pytest.approx([values[LOSS] for values in plain], rel=1e-3)
    peaks = [values["memory/max_active(GiB)"] for values in (plain[-1], offloaded[-1])]
    assert peaks[1] < peaks[0]


def test_muon_trains(folder):
    steps = train(folder, "run", "--optimizer.name=Muon")
    assert steps[-1][LOSS] < steps[0][LOSS] - 0.5


@pytest.mark.parametrize("state_dtype", ["bfloat16", "int8", "int4", "float8"])
def test_low_bit_optimizer_states_train(folder, state_dtype):
    steps = train(folder, "run", f"--optimizer.state_dtype={state_dtype}")
    assert steps[-1][LOSS] < steps[0][LOSS] - 0.5


def test_float16_trains(folder):
    steps = train(folder, "run", "--training.mixed_precision_param=float16")
    assert steps[-1][LOSS] < steps[0][LOSS] - 0.5


def test_resume_with_deterministic_algorithms_is_bit_for_bit(folder):
    arguments = ["--checkpoint.enable", "--debug.deterministic", "--lr_scheduler.total_steps=6"]
    uninterrupted = train(folder, "uninterrupted", *arguments)
    train(folder, "resumed", *arguments, "--training.steps=3", "--checkpoint.async_mode=async")
    resumed = train(folder, "resumed", *arguments)
    for tag in ("step", LOSS, "grad_norm"):
        assert [values[tag] for values in resumed] == [values[tag] for values in uninterrupted]


def test_memory_snapshot(folder):
    train(folder, "run", "--profiling.enable_memory_snapshot", "--profiling.profile_freq=4")
    assert (folder / "run" / "memory_snapshot" / "step_4" / "rank0.pickle").stat().st_size > 1000


def test_measured_peak_flops_are_below_the_data_sheets():
    data_sheet = PeakFlops(DEVICE, torch.bfloat16)
    measured = PeakFlops(DEVICE, torch.float16)  # as fast, and in no table
    assert "measured" in measured.source
    assert 0.3 * data_sheet.flops < measured.flops < 1.05 * data_sheet.flops


# The parity command ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
@pytest.mark.parametrize(("n_ranks", "axis"), [(1, "tensor"), (2, "tensor"), (2, "context"), (2, "pipeline")], ids=str)
def test_parity_command_under_torchrun(folder, n_ranks, axis, dtype):
    if torch.cuda.device_count() < n_ranks:
        pytest.skip(f"needs {n_ranks} CUDA devices")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={n_ranks}"]
    arguments = [str(folder / "gpu.toml"), f"--dtype={dtype}", f"--parallelism.{axis}_parallel_degree={n_ranks}"]
    command = [*launch, "-m", "titanlite", "parity", *arguments]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("\nequal: the largest difference") == 1


# Attention backends ---------------------------------------------------------------------------------------------------

NAMES = ("out", "dq", "dk", "dv")
by_backend = pytest.mark.parametrize(
    ("backend", "dtype"),
    [*((name, torch.bfloat16) for name in ATTENTION_BACKENDS if name != "cpu"), ("efficient", torch.float32)],
    ids=str,
)
by_shape = pytest.mark.parametrize(("kv_heads", "tokens"), [(8, 256), (2, 256), (2, 37)])


def draw(kv_heads: int, tokens: int, dtype: torch.dtype) -> list[Tensor]:
    """Draw the output's gradient, q, k, v with 8 query heads of head_dim 64, strided as in the model."""
    generator = torch.Generator(DEVICE).manual_seed(7)
    shapes = [(2, tokens, n, 64) for n in (8, 8, kv_heads, kv_heads)]
    return [torch.randn(x, generator=generator, device=DEVICE).to(dtype).transpose(1, 2) for x in shapes]


def attend(backend: str, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[list[Tensor], Tensor]:
    """Return the output with the gradients of q, k, v; and the log-sum-exp."""
    out, lse = ATTENTION_BACKENDS[backend].forward(q, k, v, causal)
    return [out, *ATTENTION_BACKENDS[backend].backward(grad, q, k, v, out, lse, causal)], lse


def reference_attention(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> list[Tensor]:
    """Return output and gradients of torch's own attention. KV heads are repeated, since none of its fused kernels
    supports grouped-query attention in float32."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    repeated = [x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in leaves]
    out = F.scaled_dot_product_attention(*repeated, is_causal=causal)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def assert_as_exact_as_torch(results: list[Tensor], inputs: list[Tensor], causal: bool) -> None:
    """Assert that the norms of the errors, from float64, are at most twice those of torch's attention in this type."""
    exact, _ = attend("math", *(x.double() for x in inputs), causal)
    reference = reference_attention(*inputs, causal)
    assert [(x.shape, x.dtype) for x in results] == [(x.shape, x.dtype) for x in reference]
    errors, allowed = ([(a - b).norm().item() for a, b in zip(x, exact, strict=True)] for x in (results, reference))
    by_name = {name: (a, b) for name, a, b in zip(NAMES, errors, allowed, strict=True)}
    assert {name: (a, b) for name, (a, b) in by_name.items() if not a <= 2 * b} == {}
    assert min(allowed) > 0


@by_backend
@by_shape
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "all keys"])
def test_attention_backend(backend, dtype, kv_heads, tokens, causal):
    inputs = draw(kv_heads, tokens, dtype)
    results, lse = attend(backend, *inputs, causal)
    assert_as_exact_as_torch(results, inputs, causal)
    _, exact = attend("math", *(x.double() for x in inputs), causal)
    assert (lse.shape, lse.dtype) == (exact.shape, torch.float32)
    # Scores are sums of 64 products, in TF32 at worst (2^-11); in bfloat16 lse would be off by 1e-2, to base 2 by 2.
    assert (lse - exact).abs().max() < 2e-3


@pytest.mark.parametrize(("backend", "dtype"), [("flash", torch.bfloat16), ("efficient", torch.float32)], ids=str)
@by_shape
def test_backward_of_a_chunk_of_keys_from_the_full_softmax(backend, dtype, kv_heads, tokens):
    """Outputs over two chunks of keys are merged in float32, as ring attention does, before each chunk's backward."""
    inputs = grad, q, k, v = draw(kv_heads, tokens, dtype)
    forward, backward = ATTENTION_BACKENDS[backend]
    chunks = [(k[:, :, keys], v[:, :, keys]) for keys in (slice(0, tokens // 2), slice(tokens // 2, None))]
    outs, lses = zip(*(forward(q, *kv, False) for kv in chunks), strict=True)
    lse = torch.logaddexp(*lses)
    out = sum(o.float() * (chunk_lse - lse).exp().unsqueeze(-1) for o, chunk_lse in zip(outs, lses, strict=True))
    out = out.to(dtype).transpose(1, 2).contiguous().transpose(1, 2)
    dqs, dks, dvs = zip(*(backward(grad, q, *kv, out, lse, False) for kv in chunks), strict=True)
    dq = sum(x.float() for x in dqs).to(dtype)
    assert_as_exact_as_torch([out, dq, torch.cat(dks, dim=2), torch.cat(dvs, dim=2)], inputs, causal=False)


@pytest.mark.parametrize("window", [0, 2, 50, 100])
@pytest.mark.parametrize("kv_heads", [8, 2])
def test_documents_in_one_call_of_flash_attention(kv_heads, window):
    """Of two sequences, the second begins in the middle of a document, and one document has a single token."""
    positions = torch.cat([torch.arange(n) for n in (60, 1, 67, 128)]).view(2, 128)
    positions[1] += 5
    grad, *qkv = (x.transpose(1, 2) for x in draw(kv_heads, 128, torch.bfloat16))
    outputs = []
    for backend in ("flash", "math"):
        leaves = [x.detach().requires_grad_() for x in qkv]
        out = TiledAttention(None, None, backend, window)(*leaves, Documents(positions))
        outputs.append([out, *torch.autograd.grad(out, leaves, grad)])
    for name, actual, expected in zip(NAMES, *outputs, strict=True):
        assert (actual - expected).float().norm() < 2**-7 * expected.float().norm(), name


@pytest.mark.parametrize("window", [2, 50, 64, 100])
@pytest.mark.parametrize("kv_heads", [8, 2])
@pytest.mark.parametrize("backend", ["flash", "flash, in blocks", "efficient"])
def test_window(monkeypatch, backend, kv_heads, window):
    """Compare with attention under a mask. Flash attention has windows; in a ring it gets their blocks like others."""
    if backend == "flash, in blocks":
        monkeypatch.delitem(PACKED_ATTENTION, "flash")
    grad, *qkv = (x.transpose(1, 2) for x in draw(kv_heads, 256, torch.bfloat16))
    t = torch.arange(256, device=DEVICE)
    allowed = (t <= t[:, None]) & (t > t[:, None] - window)
    leaves = [x.detach().requires_grad_() for x in qkv]
    out = TiledAttention(None, None, backend.split(",")[0], window)(*leaves)
    results = [out, *torch.autograd.grad(out, leaves, grad)]
    exact = [x.detach().double().requires_grad_() for x in qkv]
    q, k, v = (x.repeat_interleave(8 // x.shape[2], dim=2).transpose(1, 2) for x in exact)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed).transpose(1, 2)
    for name, actual, expected in zip(
        NAMES, results, [out, *torch.autograd.grad(out, exact, grad.double())], strict=True
    ):
        assert (actual - expected).norm() < 2**-7 * expected.norm(), name
