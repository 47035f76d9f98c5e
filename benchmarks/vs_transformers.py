"""titanlite beside transformers' LlamaForCausalLM in a plain PyTorch loop, on the CPU of this machine.

The same 6.16 million parameters, sequence length, global batch, precision (float32) and optimizer (fused AdamW). Both
sides are whole processes. They take their steps in turn, one stopped (SIGSTOP) while the other runs, so a machine whose
speed drifts slows both alike. A mode is a pair of programs:

    alone, ddp, fsdp         titanlite and the plain loop, in one process, or on two ranks: dp_replicate = 2 and DDP,
                             dp_shard = 2 and FSDP2
    tp, pp, cp, ulysses      titanlite on two ranks that share one copy of the model or each sequence, for which a plain
                             loop has no counterpart, and titanlite in one process that has both ranks' threads
    tp-fsdp, ... (the same)  titanlite on the same two ranks, and the plain loop on two ranks of FSDP2

    python benchmarks/vs_transformers.py [--rounds N] [--steps N] [--modes alone ddp ...]     (default: all modes)

Prints for each mode: tokens/s (median over all steps but the first two of a launch), peak resident memory (summed over
ranks, median over launches), seconds from launch to the end of the first step (median over launches); and the medians
of the ratios of neighbouring steps and of launches, the first program of the pair over the second. Above 1 is better
for tokens/s, below 1 for the others. Before that, a line of JSON a launch: its peaks and first steps, the seconds of
each pair of steps, the first and the last loss of each side. interleaved.py has the method.
"""

import os
import platform
import sys

import torch
import transformers
from interleaved import ROOT, Program, compare, parser, program

HERE = ROOT / "benchmarks"
TOKENS = 8 * 512  # a step over all ranks


def titanlite(steps: int, ranks: int, folder: str, local_batch: int, **parallelism: int | str) -> Program:
    """train.py. Each side of a pair writes to a folder of its own."""
    options = {"training.steps": steps, "training.local_batch_size": local_batch}
    options |= {"job.dump_folder": f"./outputs/vs_transformers/{folder}"}
    options |= {f"parallelism.{key}": value for key, value in parallelism.items()}
    script = [str(ROOT / "train.py"), str(HERE / "vs_transformers.toml")]
    return program("titanlite", ranks, script, options, python=sys.executable)


def plain_loop(steps: int, kind: str) -> Program:
    """transformers_loop.py, `kind` being alone, ddp or fsdp."""
    ranks = 1 if kind == "alone" else 2
    script = [str(HERE / "transformers_loop.py"), str(steps), str(8 // ranks), *([] if ranks == 1 else [kind])]
    return program("plain loop", ranks, script, {}, python=sys.executable)


def modes(steps: int) -> dict[str, tuple[Program, Program]]:
    """The pairs, for runs of so many steps."""
    replicate = {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 1}
    pipeline = {"pipeline_parallel_degree": 2, "pipeline_parallel_microbatch_size": 2}  # four microbatches, 1F1B
    alone = titanlite(steps, 1, "alone", 8)
    fsdp = plain_loop(steps, "fsdp")
    axes = {
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
        **{name: (axis, alone._replace(name="one process")) for name, axis in axes.items()},
        **{f"{name}-fsdp": (axis, fsdp) for name, axis in axes.items()},
    }


def main() -> None:
    options = parser(__doc__, modes(0)).parse_args()
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {options.rounds} launches of each side")
    for mode in options.modes:
        programs = modes(options.steps + 1)[mode]  # one more than is taken: the last one is followed by the end
        compare(mode, programs, rounds=options.rounds, steps=options.steps, tokens=TOKENS)


if __name__ == "__main__":
    main()
