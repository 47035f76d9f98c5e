"""How true the plan is: its memory against real runs on this machine, its memory and speed against published runs.

    python benchmarks/plan_accuracy.py [--only NAME ...]

Memory on a CPU: real ranks over gloo take three training steps of a small model under each layout. The third step's
peak is the memory of all tensors before it, and what the kernel says that the process grew by at most (resident.py);
the plan's is for the same config, and both are of the rank that has most. Nothing else is shared between the two.

Published runs: throughput and memory that others reported, with the source. What cannot be compared is said beside it.

Prints a line of JSON a row, then the tables. Bounds: 3 % for memory on a CPU.
"""

import argparse
import gc
import json
import platform
from typing import Any

import torch
import torch.distributed as dist
from resident import forget_peak, map_each_tensor, resident_bytes
from torch import Tensor, nn

from titanlite import build, mesh, parity, plan
from titanlite.config import Config, Launch, check, load
from titanlite.optimizer import clip_factor, gradient_norm, scale_gradients
from titanlite.ranks import Pool

MODEL = {
    "model.dim": 256,
    "model.n_layers": 8,
    "model.vocab_size": 2048,
    "training.seq_len": 512,
    "training.local_batch_size": 4,
    "plan.device": "cpu",
}
PIPELINE = {"parallelism.pipeline_parallel_degree": 2, "training.local_batch_size": 8}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {}),
    "accumulation": (1, {"training.global_batch_size": 16}),
    "recompute full": (1, {"activation_checkpoint.mode": "full"}),
    "recompute op": (1, {"activation_checkpoint.mode": "selective"}),
    "recompute every 2nd": (
        1,
        {"activation_checkpoint.mode": "selective", "activation_checkpoint.selective_ac_option": 2},
    ),
    "loss in 8": (1, {"training.loss_chunks": 8}),
    "bfloat16": (1, {"training.mixed_precision_param": "bfloat16"}),
    "bfloat16 moments": (1, {"optimizer.state_dtype": "bfloat16", "optimizer.implementation": "fused"}),
    "shard 2": (2, {"parallelism.data_parallel_shard_degree": 2}),
    "shard 4": (4, {"parallelism.data_parallel_shard_degree": 4}),
    "shard 4, ZeRO-2": (
        4,
        {"parallelism.data_parallel_shard_degree": 4, "parallelism.fsdp_reshard_after_forward": "never"},
    ),
    "replicate 2": (2, {"parallelism.data_parallel_replicate_degree": 2, "parallelism.data_parallel_shard_degree": 1}),
    "hybrid 2 x 2": (4, {"parallelism.data_parallel_replicate_degree": 2}),
    "tensor 2": (2, {"parallelism.tensor_parallel_degree": 2}),
    "tensor 2 x shard 2": (4, {"parallelism.tensor_parallel_degree": 2}),
    "ring 2": (2, {"parallelism.context_parallel_degree": 2}),
    "ulysses 2": (
        2,
        {"parallelism.context_parallel_degree": 2, "parallelism.context_parallel_ulysses_degree": 2},
    ),
    "GPipe 2": (2, {**PIPELINE, "parallelism.pipeline_parallel_schedule": "GPipe"}),
    "1F1B 2": (2, PIPELINE),
    "interleaved 2": (2, {**PIPELINE, "parallelism.pipeline_parallel_schedule": "Interleaved1F1B"}),
    "zero-bubble 2": (2, {**PIPELINE, "parallelism.pipeline_parallel_schedule": "InterleavedZeroBubble"}),
    "ZBV 2": (2, {**PIPELINE, "parallelism.pipeline_parallel_schedule": "ZBVZeroBubble"}),
    "1F1B 2 x tensor 2": (4, {**PIPELINE, "parallelism.tensor_parallel_degree": 2}),
    "float8, shard 2": (2, {"float8.enable": "true", "float8.emulate": "true"}),
}
ALLOWED = 0.03


def config_of(options: dict[str, Any], ranks: int) -> tuple[Any, Config, Launch]:
    """As loaded, and as resolved for so many ranks."""
    loaded = load(["configs/debug.toml", *(f"--{key}={value}" for key, value in options.items())])
    launch = Launch(0, 0, ranks, ranks, 0)
    return loaded, check(loaded, launch), launch


def measure(options: dict[str, Any]) -> int:
    """Bytes at the peak of this rank's third step. Every rank must call it."""
    launch = Launch.from_environment(0)
    _, config, _ = config_of(options, launch.world_size)
    device = mesh.device_of(launch)
    layout = build.build_layout(config, device)
    model, stages = build.build_model(config, layout, device)
    work = build.build_step(config, layout, model, stages, device)
    optimizer = build.build_optimizer(config, model, stages.values())
    loader = build.build_loader(config, layout, parity.proof_sequences(config), device=device, state=None)
    parameters = list(model.parameters())
    for _ in range(3):
        batch = loader.next()
        gc.collect()
        held, before = held_bytes(), resident_bytes("VmRSS")
        forget_peak()
        work.forward_backward(batch)
        norm = gradient_norm(parameters, device)
        scale_gradients(parameters, clip_factor(norm, config.training.max_norm))
        optimizer.step()
        optimizer.zero_grad()
        peak = held + resident_bytes("VmHWM") - before
    loader.close()
    dist.barrier()
    return peak


def held_bytes() -> int:
    """Of the memory of all tensors that Python knows of."""
    storages = {}
    for thing in gc.get_objects():
        if type(thing) in (Tensor, nn.Parameter):
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def against_real_runs(names: list[str]) -> list[str]:
    """Lines of the table."""
    lines, pools = [], {}
    for name in names:
        ranks, changed = LAYOUTS[name]
        options = MODEL | changed
        if ranks not in pools:
            pools[ranks] = Pool(ranks, timeout_seconds=300)
        measured = max(pools[ranks].run(measure, options=options))
        planned = plan.make_plan(config_of(options, ranks)[0], world_size=ranks).worst.peak.total
        off = planned / measured - 1
        print(json.dumps({"layout": name, "ranks": ranks, "measured": measured, "planned": planned}), flush=True)
        verdict = "" if abs(off) <= ALLOWED else f"   more than {ALLOWED:.0%}"
        lines.append(f"{name:24} {ranks:5} {measured / 2**20:10.1f} {planned / 2**20:10.1f} {off:+8.1%}{verdict}")
    for pool in pools.values():
        pool.close()
    return [f"{'memory at the peak, MiB':24} {'ranks':>5} {'measured':>10} {'planned':>10}", *lines]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    arguments = parser.parse_args()
    map_each_tensor()
    print(f"torch {torch.__version__}, {platform.machine()}; {json.dumps(MODEL)}")
    print("\n".join(against_real_runs(arguments.only)))


if __name__ == "__main__":
    main()
