"""Compare titanlite with a plain PyTorch loop over a model of transformers, on the CPU of this machine.

Both train a model of as many parameters (Llama: 6.16 million; Qwen3-MoE: 59.8 million) with the same sequence length,
global batch, precision (float32) and optimizer (fused AdamW). interleaved.py has the method: each program is a separate
process, and on a shared machine they take their steps alternately. A mode is a pair of programs:

    alone, ddp, fsdp         titanlite and the plain loop, in one process, or on two ranks: dp_replicate = 2 and DDP,
                             dp_shard = 2 and FSDP2
    tp, pp, cp, ulysses      titanlite with tensor, pipeline or context parallelism on two ranks, which the plain loop
                             does not have, and titanlite in one process with as many threads as both ranks
    tp-fsdp, ... (the same)  titanlite on the same two ranks, and the plain loop on two ranks of FSDP2
    moe, moe-grouped         Qwen3-MoE in one process; transformers' experts are its loop, or grouped_mm

    python -m benchmarks.others.vs_transformers [--rounds N] [--steps N] [--modes alone ddp ...]  (default: all modes)

The results of a mode are throughput in tokens per second (median over the steps of all launches, without the first
two steps of each), peak resident memory (summed over the ranks, median over launches), and the seconds from the launch
to the end of the first step (median over launches). Each has the median of the ratios of neighbouring steps or of
launches, the first program over the second: above 1 is better for tokens/s, below 1 for the others. Before the results,
each launch prints a JSON line with its peaks, its first steps, the seconds of each pair of steps, and the first and
last loss of each program.
"""

import os
import platform
import sys

import torch
import transformers

from benchmarks.others.interleaved import Program, compare, parser, program
from benchmarks.python_path import ROOT

HERE = ROOT / "benchmarks" / "others"
TOKENS = 8 * 512  # of the global batch


def titanlite(
    steps: int,
    ranks: int,
    folder: str,
    local_batch: int,
    config: str = "vs_transformers.toml",
    **parallelism: int | str,
) -> Program:
    """Return the command of train.py, which writes to a folder of its own."""
    options = {"training.steps": steps, "training.local_batch_size": local_batch}
    options |= {"job.dump_folder": f"./outputs/vs_transformers/{folder}"}
    options |= {f"parallelism.{key}": value for key, value in parallelism.items()}
    script = [str(ROOT / "train.py"), str(HERE / config)]
    return program("titanlite", ranks, script, options, python=sys.executable)


def plain_loop(steps: int, kind: str) -> Program:
    """Return the command of transformers_loop.py; `kind` is alone, ddp, fsdp, eager or grouped_mm."""
    ranks = 2 if kind in ("ddp", "fsdp") else 1
    script = [str(HERE / "transformers_loop.py"), str(steps), str(8 // ranks), kind]
    return program("plain loop", ranks, script, {}, python=sys.executable)


def modes(steps: int) -> dict[str, tuple[Program, Program]]:
    """Return the pair of programs of each mode, for runs of this many steps."""
    replicate = {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 1}
    pipeline = {"pipeline_parallel_degree": 2, "pipeline_parallel_microbatch_size": 2}  # four microbatches, 1F1B
    alone = titanlite(steps, 1, "alone", 8)
    experts = titanlite(steps, 1, "moe", 8, config="vs_transformers_moe.toml")
    fsdp = plain_loop(steps, "fsdp")
    layouts = {
        "tp": titanlite(steps, 2, "tp", 8, tensor_parallel_degree=2),
        "pp": titanlite(steps, 2, "pp", 8, **pipeline),
        "cp": titanlite(steps, 2, "cp", 8, context_parallel_degree=2),
        "ulysses": titanlite(steps, 2, "ulysses", 8, context_parallel_degree=2, context_parallel_ulysses_degree=2),
    }
    return {
        "alone": (alone, plain_loop(steps, "alone")),
        "ddp": (
            titanlite(steps, 2, "ddp", 4, **replicate, fsdp_reshard_after_forward="never"),
            plain_loop(steps, "ddp"),
        ),
        "fsdp": (titanlite(steps, 2, "fsdp", 4, data_parallel_shard_degree=2), fsdp),
        **{name: (layout, alone._replace(name="one process")) for name, layout in layouts.items()},
        **{f"{name}-fsdp": (layout, fsdp) for name, layout in layouts.items()},
        "moe": (experts, plain_loop(steps, "eager")),
        "moe-grouped": (experts, plain_loop(steps, "grouped_mm")),
    }


def main() -> None:
    options = parser(__doc__, modes(0)).parse_args()
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    print(f"{versions}; {options.rounds} launches of each program")
    for mode in options.modes:
        programs = modes(options.steps + 1)[mode]  # one more than is measured: a program ends after its last
        compare(mode, programs, rounds=options.rounds, steps=options.steps, tokens=TOKENS)


if __name__ == "__main__":
    main()
