"""Count what fully_shard copies on one rank, and time a step with and without it, on a CPU.

    python -m benchmarks.speed.one_rank_copies [--rounds 7] [--tokens 192]

The model of vs_torchtitan.py takes steps of two gradient accumulation steps, one sequence of so many tokens each. (No
activation of 192 tokens is as large as a parameter, by which copies are told apart.)
"in place" is fsdp.use_in_place; "copied" does without it, with weights that are freed after a layer's forward, as they
were by default before. In each type of weights, computation and reductions, a line has the operators of fully_shard and
of the accumulation of gradients, the bytes per parameter that they read and write, the median of the seconds of a step,
and the median over rounds, in which both take a step, of the ratio. The weights of both are compared at the end.
"""

import argparse
import contextlib
import statistics
import time
from collections import Counter
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from benchmarks.others.vs_torchtitan import FLAVORS, TOML
from titanlite import build
from titanlite.config import Launch, check, load
from titanlite.launch.process import exit_process, retain_freed_memory
from titanlite.tools.parity.training_run import TrainingRun

COPIES = ("copy_", "_foreach_copy_", "_to_copy", "chunk_cat", "_chunk_cat", "add_")
TYPES = [("bfloat16", "bfloat16", "bfloat16"), ("bfloat16", "bfloat16", "float32"), ("float32", "float32", "float32")]
CASES = {"copied": "always", "in place": "never"}


class Copies(TorchDispatchMode):
    """Counts operators that copy or add tensors as large as a parameter or a unit, and the bytes that they read and
    write."""

    def __init__(self, sizes: set[int]):
        super().__init__()
        self.sizes, self.operators, self.bytes = sizes, Counter[str](), 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented
        result = function(*args, **(kwargs or {}))
        name = function._schema.name.partition("::")[2]
        if name in COPIES:
            read = [x for x in tree_iter(args[1:] if name == "copy_" else args) if isinstance(x, Tensor)]
            written = (kwargs or {}).get("out", args[0] if name.endswith("_") else result)
            # torch_workarounds.NothingToReduce has FSDP2 copy a buffer onto itself, which copy_ leaves alone.
            onto_itself = name == "copy_" and args[0].data_ptr() == args[1].data_ptr()
            if any(x.numel() in self.sizes for x in read) and not onto_itself:
                self.operators[name] += 1
                self.bytes += sum(x.nbytes for x in [*read, *tree_iter(written)])
        return result


def build_run(case: str, types: tuple[str, str, str], tokens: int) -> TrainingRun:
    keys = ("training.dtype", "training.mixed_precision_param", "training.mixed_precision_reduce")
    options = FLAVORS["debug"][0] | dict(zip(keys, types, strict=True))
    options |= {"training.local_batch_size": 1, "training.global_batch_size": 2, "training.seq_len": tokens}
    options |= {"parallelism.fsdp_reshard_after_forward": CASES[case]}
    job = check(load([str(TOML), *(f"--{key}={value}" for key, value in options.items())]), Launch(0, 0, 1, 1, 0))
    copied = mock.patch.object(build, "use_in_place")
    with copied if case == "copied" else contextlib.nullcontext():
        run = TrainingRun(job, torch.device("cpu"))
    run.step(run.loader.next())
    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=192)
    options = parser.parse_args()
    retain_freed_memory()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {vars(options)}")
    for types in TYPES:
        runs, seconds = {case: build_run(case, types, options.tokens) for case in CASES}, {case: [] for case in CASES}
        n_parameters = sum(parameter.numel() for parameter in runs["copied"].model.parameters())
        print(f"weights {types[0]}, computation {types[1]}, reductions {types[2]}: {n_parameters:,} parameters")
        for _ in range(options.rounds):
            for case, run in runs.items():
                batches, start = run.loader.next(), time.perf_counter()
                run.step(batches)
                seconds[case].append(time.perf_counter() - start)
        for case, run in runs.items():
            units = [*run.model.layers.values(), torch.nn.ModuleList([run.model.norm, run.model.output])]
            sizes = {sum(parameter.numel() for parameter in unit.parameters()) for unit in units}
            sizes |= {parameter.numel() for parameter in run.model.parameters()}
            with Copies(sizes) as copies:
                run.train_step.forward_backward(run.loader.next())
            ratio = statistics.median(a / b for a, b in zip(seconds[case], seconds["copied"], strict=True))
            counts = ", ".join(f"{n} {name}" for name, n in sorted(copies.operators.items()))
            print(f"  {case}: {copies.bytes / n_parameters:.1f} bytes per parameter ({counts})")
            print(f"  {case}: {statistics.median(seconds[case]):.4f} s per step, ratio {ratio:.3f}")
        both = zip(*(run.model.parameters() for run in runs.values()), strict=True)
        equal = all(torch.equal(x.to_local(), y.to_local()) for x, y in both)
        print(
            f"  weights after {options.rounds + 1} steps: {'equal, bit for bit' if equal else 'DIFFERENT'}", flush=True
        )
        for run in runs.values():
            run.loader.close()
    exit_process(0)


if __name__ == "__main__":
    main()
