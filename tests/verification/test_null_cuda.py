"""What training asks of a GPU, counted on the null CUDA (build.py): waits of the host, kernels, communicators, memory.

    pip install torch==2.11.0              the build with CUDA, as PyPI has it
    pytest -m nightly tests/verification/test_null_cuda.py

Nothing here is measured on a GPU.
"""

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from titanlite import config
from titanlite.tools.plan.planner import resolve, takes_cudnn
from verification.null_cuda import build
from verification.null_cuda.cases import case, layouts
from verification.null_cuda.client import ROOT, Server
from verification.null_cuda.memory import CASES, of_8b, peaks

LAYOUTS, TORCH = layouts(), tuple(map(int, torch.__version__.split(".")[:2]))

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(bool(build.why_not()), reason=build.why_not()),
    pytest.mark.timeout(900),
]


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("libraries")


@pytest.fixture(scope="module")
def server(libraries: Path) -> Iterator[Server]:
    server = Server(libraries)
    yield server
    server.close()


# Every option and axis ------------------------------------------------------------------------------------------------

WAITS = [
    (
        "expert_parallel_degree",
        "the host gives what experts receive its size",
        {"titanlite/techniques/moe/counts.py read"},
    ),
    (
        "training__enable_cpu_offload",
        "gradients are copied to the host, whose optimizer updates the weights; ?: by FSDP in a thread of autograd",
        {"?", *(f"titanlite/{line}" for line in ("optimizer.py gradient_norm", "optimizer.py clipped_step",
                                                 "parallel/pipeline.py forward_backward"))},
    ),
    (
        "optimizer__enable_cpu_offload",
        "the host updates weights by the clip factor, while others are copied",
        {f"titanlite/techniques/offloaded_adam.py {name}" for name in ("wait_until_copied", "wait_until_free",
                                                                       "<dictcomp>")},
    ),
]  # fmt: skip
"""Options under which the host waits for the device between the first forward and the last update of a step, why, and
the lines that wait."""


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_step(server: Server, name: str):
    """Three steps: after the second, nothing is compiled anew and no communicator is made. In none does the host wait
    for the device, but by the lines of WAITS."""
    options = LAYOUTS[name]
    allowed = {line for option, _, lines in WAITS if options.get(option) for line in lines}
    for _, first, second, third in server.run(case(options)):
        for step in (second, third):
            assert step["communicators"] == []
            assert step["graphs"] == first["graphs"]
            lines = {wait.partition(": ")[2] for wait in step["waits"]}
            assert lines <= allowed
        if not options.get("training__document_mask"):  # the tiles of a ring are those of the documents
            assert third["launches"] == second["launches"]


# Memory that several streams use --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def busy_server(libraries: Path) -> Iterator[Server]:
    """A server whose devices are never done, so that only the order of streams lets memory be used again."""
    server = Server(libraries, NULL_CUDA_IS_BUSY="1")
    yield server
    server.close()


@pytest.mark.parametrize("name", [name for name in LAYOUTS if "compiled" not in name])
def test_streams_are_ordered(busy_server: Server, name: str):
    """What a stream reads is what was written for it, and nobody overwrites it meanwhile. (Compiled blocks launch
    their kernels without operators that could be seen.)"""
    assert [races for races in busy_server.run(case(LAYOUTS[name], steps=4) | {"bug": ""}) if races] == []


@pytest.mark.parametrize(
    ("name", "bug", "operators"),
    [
        ("tp 2", "forget the stream", ["aten::add_", "release"]),
        ("cp 2", "do not wait for the ring", ["ncclRecv", "aten::_scaled_dot_product_flash_attention"]),
        ("optimizer offload, pp", "update before the copy", ["aten::copy_", "aten::_fused_adamw_"]),
    ],
)
def test_streams_without_order_are_found(busy_server: Server, name: str, bug: str, operators: list[str]):
    for races in busy_server.run(case(LAYOUTS[name], steps=4) | {"bug": bug}):
        assert operators in [race[:2] for race in races]


# Kernels of a compiled block ------------------------------------------------------------------------------------------


def test_kernels_of_a_compiled_block(server: Server):
    """Those that one more layer of Llama 3 8B adds to a step. Inductor has at most 5 in the forward and 10 in the
    backward, and copies and transposes nothing."""
    two, three = (server.run(of_8b(f"--model.n_layers={n}", batch=2))[0][-1]["launches"] for n in (2, 3))
    kinds = {
        "triton_": "of inductor",
        "cublas": "products",
        "cudnnBackendExecute": "attention, with the sums over the query heads of a KV head",
        "reduce_kernel": "sums over the rows of norms' gradients",
        "multi_tensor_apply": "gradient norm and optimizer",
    }
    added = Counter[str]()
    for name in three:
        readable = subprocess.run(["c++filt", name], capture_output=True, text=True, check=True).stdout
        added[next((kind for kind in kinds if kind in readable), readable)] += three[name] - two.get(name, 0)
    assert 0 < added.pop("triton_") <= 5 + 10
    assert added.pop("multi_tensor_apply") > 0
    expected = {"cublas": 3 * 7, "cudnnBackendExecute": 2, "reduce_kernel": 2}
    assert {kind: count for kind, count in added.items() if count} == expected


SHAPES = [
    *((dtype, 128, False) for dtype in ("bfloat16", "float16", "float32", "float64")),
    *(("bfloat16", head_dim, False) for head_dim in (20, 64, 136, 192, 256, 264)),
    ("bfloat16", 128, True),
]
"""Data type, head_dim, and whether algorithms have to be deterministic."""
GB300 = str(ROOT / "benchmarks" / "planner" / "gb300.toml")
CAPABILITIES = {"a100_80": 80, "l40s": 89, "h200": 90, "b200": 100, GB300: 103}


@pytest.mark.skipif(TORCH >= (2, 14), reason="takes other widths of heads")
@pytest.mark.parametrize(("device", "capability"), CAPABILITIES.items(), ids=map(str, CAPABILITIES.values()))
def test_the_plan_has_cudnn_where_torch_takes_it(libraries: Path, device: str, capability: int):
    """With 16 query heads and 8 KV heads."""
    script = """
import json, sys, torch
from torch.nn.attention import SDPBackend

for dtype, head_dim, deterministic in json.loads(sys.argv[1]):
    torch.use_deterministic_algorithms(deterministic)
    options = {"device": "cuda", "dtype": getattr(torch, dtype), "requires_grad": True}
    q, k, v = (torch.empty(2, heads, 512, head_dim, **options) for heads in (16, 8, 8))
    choice = torch._fused_sdp_choice(q, k, v, None, 0.0, True, enable_gqa=True)
    print(SDPBackend(choice) == SDPBackend.CUDNN_ATTENTION)
"""
    variables = build.variables(libraries) | {"NULL_CUDA_CAPABILITY": str(capability)}
    command = [sys.executable, "-c", script, json.dumps(SHAPES)]
    run = subprocess.run(command, env=variables, cwd=ROOT, check=True, text=True, stdout=subprocess.PIPE)
    planned = []
    for dtype, head_dim, deterministic in SHAPES:
        options = {"plan.device": device, "training.mixed_precision_param": dtype, "model.head_dim": head_dim}
        options |= {"debug.deterministic": str(deterministic).lower()}
        arguments = [str(ROOT / "configs" / "debug.toml"), *(f"--{key}={value}" for key, value in options.items())]
        planned.append(takes_cudnn(*resolve(config.load(arguments))[:2]))
    assert run.stdout.split() == [str(choice) for choice in planned]


def test_rows_are_sorted_by_expert_in_one_pass(server: Server):
    """Two layers of Qwen3 30B-A3B sort what a rank sends, its scores, and those that arrive, in the forward and again
    for the backward. The backward of the embedding sorts too, by tokens of 64 bits: in eight passes, and from torch
    2.13 on in three."""
    options = "--model.n_layers=2 --model.hf_assets_path= --training.dataset=pydoc_topics --training.streaming=false"
    options += " --training.local_batch_size=2 --training.global_batch_size=4 --training.seq_len=4096"
    options += " --parallelism.data_parallel_shard_degree=2 --parallelism.expert_parallel_degree=2"
    config = (ROOT / "configs" / "reference" / "qwen3_30b_a3b.toml").read_text()
    case = {"world_size": 2, "config": config, "arguments": options.split(), "steps": 2}
    launches = server.run(case)[0][-1]["launches"]
    sorts, passes = (
        sum(count for name, count in launches.items() if kernel in name)
        for kernel in ("DeviceRadixSortHistogramKernel", "DeviceRadixSortOnesweepKernel")
    )
    assert sorts == 1 + 2 * 2 * 3
    assert passes == (8 if TORCH < (2, 13) else 3) + 2 * 2 * 3


def test_rotary_embeddings_load_each_number_without_a_mask(libraries: Path):
    """x, its neighbour, cos and sin in the forward, and as many in the backward."""
    script = """
import torch
from torch._inductor.utils import run_and_get_code
from titanlite.rope import apply_rotary_emb

def forward_and_backward():
    y = torch.compile(apply_rotary_emb)(x, torch.empty(64, 64, 2, device="cuda"))
    y.backward(torch.empty_like(y))

x = torch.empty(1, 64, 8, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
for code in run_and_get_code(forward_and_backward)[1]:
    loads = [line for line in code.splitlines() if "tl.load(" in line]
    print(len(loads), sum(", None" in line for line in loads))
"""
    variables, pipes = build.variables(libraries), {"stdout": subprocess.PIPE}
    run = subprocess.run([sys.executable, "-c", script], env=variables, cwd=ROOT, check=True, text=True, **pipes)
    assert run.stdout.splitlines() == ["4 4", "4 4"]


# The whole program ----------------------------------------------------------------------------------------------------


def train(libraries: Path, folder: Path, *arguments: str, ranks: int = 1) -> list[list[dict[str, Any]]]:
    """Run `titanlite train` on ranks, and return what each step but the last asked of each rank's device."""
    variables = build.variables(libraries) | {"NULL_CUDA_DEVICES": str(ranks)}
    torchrun = ["torch.distributed.run", "--standalone", "--local-addr=localhost", f"--nproc-per-node={ranks}"]
    options = [*arguments, f"--job.dump_folder={folder}", "--metrics.enable_tensorboard=false"]
    command = [sys.executable, "-m", *torchrun, "-m", "verification.null_cuda.rank", str(folder), *options]
    subprocess.run(command, cwd=ROOT, env=variables, check=True)
    reports = [(folder / f"asked_of_{rank}.jsonl").read_text().splitlines() for rank in range(ranks)]
    return [[json.loads(line) for line in lines] for lines in reports]


def test_a_step_of_training_waits_once(libraries: Path, tmp_path: Path):
    """When its loss and norm are read; when it is logged, once more."""
    arguments = ["configs/debug.toml", "--training.steps=7", "--metrics.log_freq=4", "--validation.enable=false"]
    (steps,) = train(libraries, tmp_path, *arguments)
    read = {"sync stream: titanlite/train_step.py read": 1, "copy pageable: titanlite/train_step.py read": 1}
    assert [step["waits"] for step in steps[1:3]] == [read] * 2
    assert steps[3]["waits"] == read | {"sync stream: titanlite/train_step.py largest_loss": 1}
    assert steps[4]["waits"] == read


def test_no_communicator_is_made_after_the_first_step(libraries: Path, tmp_path: Path):
    """Neither by a validation, whose forward has no backward."""
    arguments = ["configs/debug_pp.toml", "--training.steps=5", "--validation.enable", "--validation.freq=2"]
    arguments += ["--parallelism.data_parallel_shard_degree=2", "--training.global_batch_size=-1"]
    for steps in train(libraries, tmp_path, *arguments, ranks=4):
        assert [step["communicators"] for step in steps[1:]] == [[], [], []]


def test_out_of_memory_is_one_line(libraries: Path, tmp_path: Path):
    """The device has 300 MiB besides what CUDA itself takes, and the debug model asks for more."""
    variables = build.variables(libraries) | {"NULL_CUDA_MIB": "900"}
    command = [sys.executable, "train.py", "configs/debug.toml", f"--job.dump_folder={tmp_path}"]
    run = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)
    assert run.returncode == 1
    (line,) = [line for line in run.stderr.splitlines() if line.startswith("error:")]
    assert "out of memory" in line


@pytest.mark.parametrize(
    ("card", "mib", "base", "gib"),
    [
        ("NVIDIA H100 80GB HBM3", 81559, "8b-b2-attention", 69.01),
        ("NVIDIA H200", 143771, "8b-b4-selective", 112.2),
    ],
)
def test_a_gpu_session_has_the_sizes_and_time_limits_that_it_needs(tmp_path: Path, card, mib, base, gib):
    """`--dry-run null-cuda` takes all training runs; here some of them."""
    steps = ["debug-compiled", base, f"{base}-rowwise", "recorded-step"]
    command = [sys.executable, "benchmarks/gpu/gpu_session.py", f"--out={tmp_path}", "--dry-run", "null-cuda"]
    variables = os.environ | {"NULL_CUDA_MIB": str(mib), "NULL_CUDA_NAME": card}
    subprocess.run([*command, "--steps", *steps], cwd=ROOT, check=True, env=variables)
    results = json.loads((tmp_path / "state.json").read_text())["cards"][card]
    assert {name: result["status"] for name, result in results.items()} == dict.fromkeys(
        ["environment", *steps], "done"
    )
    assert results[base]["memory/max_active(GiB)"] == pytest.approx(gib, rel=0.01)  # the figures of NOTEBOOK.md


@pytest.mark.parametrize("name", CASES)
def test_memory_is_that_of_the_plan(server: Server, name: str):
    """With four layers; memory.py has all."""
    allocated, planned = peaks(server, CASES[name], "--model.n_layers=4")
    assert planned == pytest.approx(allocated, rel=0.05)


def test_memory_does_not_depend_on_when_the_device_is_done(busy_server: Server):
    """Of float32 weights, whose gradients one rank reduces into a buffer in every accumulation step."""
    case = of_8b("--training.dtype=float32", "--compile.enable=false", batch=1, accumulation_steps=4)
    allocated, planned = peaks(busy_server, case, "--model.n_layers=4")
    assert planned == pytest.approx(allocated, rel=0.02)


def test_fingerprints_do_not_change_what_other_steps_wait_for(libraries: Path, tmp_path: Path):
    """Every third step has some, under tensor parallel and in a pipeline."""
    arguments = ["configs/debug_tp.toml", "--training.steps=6", "--validation.enable=false", "--metrics.log_freq=100"]
    arguments += ["--parallelism.pipeline_parallel_degree=2", "--debug.fingerprint_freq=3"]
    for steps in train(libraries, tmp_path, *arguments, ranks=4):
        waits = [step["waits"] for step in steps]
        assert waits[1] == waits[3] == waits[4]  # the second, fourth and fifth step
        assert waits[1] != waits[2]
        assert [step["communicators"] for step in steps[1:]] == [[]] * 4
    names = sorted(path.name for path in tmp_path.rglob("step-*.safetensors"))
    assert names == ["step-1.safetensors", "step-3.safetensors", "step-6.safetensors"]
