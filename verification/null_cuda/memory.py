"""Compare the memory of the plan with the peak of torch's allocator on the null CUDA, for Llama 3 8B on one device with
each kind of option, and for the reference configs for 8 devices.

    python -m verification.null_cuda.memory   prints a row for each, after half an hour

Tensors only: both leave out the CUDA context, and what the allocator reserves besides.
"""

import tempfile
from pathlib import Path
from typing import Any

from titanlite import config
from titanlite.config.loader import find_config
from titanlite.tools.plan.planner import make_plan
from verification.null_cuda.client import ROOT, Server

GIB = 2**30
LARGE = "benchmarks/gpu/gpu_session.toml"
LLAMA_8B = ["--model.flavor=llama3_8b", "--training.seq_len=4096", "--compile.enable", "--training.dtype=bfloat16"]
OWN_DATA = ["--model.hf_assets_path=", "--training.dataset=pydoc_topics", "--training.streaming=false"]
AXES = ("pipeline_parallel", "data_parallel_shard", "tensor_parallel", "context_parallel", "expert_parallel")
OFF = ["--checkpoint.enable=false", "--metrics.enable_tensorboard=false"]


def of_8b(*arguments: str, batch: int, accumulation_steps: int = 1) -> dict[str, Any]:
    """Return two steps of Llama 3 8B on one device."""
    batches = [f"--training.local_batch_size={batch}", f"--training.global_batch_size={batch * accumulation_steps}"]
    arguments = (*LLAMA_8B, *batches, *arguments)
    return {"world_size": 1, "config": (ROOT / LARGE).read_text(), "arguments": arguments, "steps": 2}


def of_reference(name: str, *options: str, global_batch_size: int) -> dict[str, Any]:
    """Return two steps of a reference config on 8 devices."""
    text = find_config(name).read_text()
    text = "".join(line for line in text.splitlines(keepends=True) if not line.startswith("streaming_shards"))
    arguments = [*OWN_DATA, *OFF, f"--training.global_batch_size={global_batch_size}", *options]
    return {"world_size": 8, "config": text, "arguments": arguments, "steps": 2}


def degrees(**axes: int) -> list[str]:
    """Return the options for the degrees of parallelism, of which the others are 1."""
    return [f"--parallelism.{axis}_degree={axes.get(axis, 1)}" for axis in AXES]


def layers(n: int) -> list[str]:
    """Return the option for the number of layers."""
    return [f"--model.n_layers={n}"]


PP_TP = degrees(pipeline_parallel=2, tensor_parallel=4)
CP_TP = degrees(context_parallel=2, tensor_parallel=4)
PP_EP = degrees(pipeline_parallel=2, data_parallel_shard=4, expert_parallel=4)
STAGES = ["--parallelism.pipeline_parallel_stages_per_rank=2"]
FEWER_EXPERTS = ["--model.moe.n_experts=64", "--model.moe.n_groups=1", "--model.moe.n_groups_per_token=1"]
SELECTIVE = "--activation_checkpoint.mode=selective"
CASES: dict[str, dict[str, Any]] = {  # of two accumulation steps each
    f"8B, {name}": of_8b(*options, batch=batch, accumulation_steps=2)
    for name, batch, *options in (
        ("no AC", 2),
        ("not compiled", 2, "--compile.enable=false"),
        ("unchunked cross-entropy", 4, "--training.loss_chunks=1"),
        ("unchunked cross-entropy, not compiled", 4, "--training.loss_chunks=1", "--compile.enable=false"),
        ("full AC", 2, "--activation_checkpoint.mode=full"),
        ("full AC, batch 8", 8, "--activation_checkpoint.mode=full"),
        ("selective AC", 4, SELECTIVE),
        ("selective AC, not compiled", 2, SELECTIVE, "--compile.enable=false"),
        ("selective AC, every second mm", 4, SELECTIVE, "--activation_checkpoint.selective_ac_option=every_second_mm"),
        ("selective AC, attention", 4, SELECTIVE, "--activation_checkpoint.selective_ac_option=attention"),
        ("selective AC, every second layer", 2, SELECTIVE, "--activation_checkpoint.selective_ac_option=2"),
        ("selective AC, float8", 4, SELECTIVE, "--float8.enable"),
        ("no AC, float8", 2, "--float8.enable"),
        ("selective AC, 8-bit optimizer states", 2, SELECTIVE, "--optimizer.state_dtype=int8"),
        ("selective AC, Muon", 2, SELECTIVE, "--optimizer.name=Muon"),
        ("selective AC, document mask", 2, SELECTIVE, "--training.document_mask"),
        ("selective AC, float32 weights, 24 layers", 2, SELECTIVE, "--training.dtype=float32", "--model.n_layers=24"),
    )
} | {
    "llama2_7b.toml": of_reference("llama2_7b", global_batch_size=64),
    "llama2_13b.toml": of_reference("llama2_13b", global_batch_size=32),
    "llama3_8b.toml": of_reference("llama3_8b", global_batch_size=32),
    "llama3_8b_256k.toml": of_reference("llama3_8b_256k", global_batch_size=2),
    "mixtral_8x7b.toml": of_reference("mixtral_8x7b", global_batch_size=32),
    "qwen3_30b_a3b.toml": of_reference("qwen3_30b_a3b", global_batch_size=64),
    "llama_30b.toml, pp 2 x tp 4, 16 layers": of_reference(
        "llama_30b", *PP_TP, *layers(16), "--training.local_batch_size=16", global_batch_size=16
    ),
    "70b.toml, pp 2 x tp 4, 12 layers": of_reference(
        "70b", *PP_TP, *layers(12), "--training.local_batch_size=8", global_batch_size=8
    ),
    "405b.toml, pp 2 x tp 4, 6 layers": of_reference(
        *("405b", *PP_TP, *layers(6), *STAGES, "--training.local_batch_size=8"),
        "--parallelism.enable_async_tensor_parallel=false",  # the null CUDA has no symmetric memory
        global_batch_size=8,
    ),
    "llama3_8b_1m.toml, cp 2 x tp 4, 131,072 tokens": of_reference(
        "llama3_8b_1m", *CP_TP, "--training.seq_len=131_072", global_batch_size=2
    ),
    "deepseek_v3_671b.toml, pp 2 x ep 4, 6 layers, 64 experts": of_reference(
        "deepseek_v3_671b", *PP_EP, *layers(6), *FEWER_EXPERTS, "--training.local_batch_size=4", global_batch_size=16
    ),
}


def peaks(server: Server, case: dict[str, Any], *arguments: str) -> tuple[int, int]:
    """Return the most bytes that the allocator had given out on a device in the second step, and the plan's."""
    case = {**case, "arguments": [*case["arguments"], *arguments]}
    allocated = max(steps[-1]["active"] for steps in server.run(case))
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        file.write(case["config"])
        file.flush()
        loaded = config.load([file.name, *case["arguments"], "--plan.device=h200"])
    return allocated, make_plan(loaded, world_size=case["world_size"]).worst.peak.total


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder), PYTORCH_ALLOC_CONF="expandable_segments:True")
        print("| 8B: Llama 3 8B, 4,096 tokens, bfloat16 | allocator, GiB | plan, GiB | difference |")
        print("| --- | --- | --- | --- |")
        for name, case in CASES.items():
            allocated, planned = peaks(server, case)
            error = f"{100 * (planned / allocated - 1):+.1f} %"
            print(f"| {name} | {allocated / GIB:.1f} | {planned / GIB:.1f} | {error} |", flush=True)
        server.close()


if __name__ == "__main__":
    main()
