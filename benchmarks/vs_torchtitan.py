"""titanlite beside torchtitan 0.2.2, on the CPU of this machine or on one GPU.

The same Llama (on a CPU of 6,163,712 parameters: what torchtitan calls "debugmodel"), sequence length, global batch
(8 x 512 tokens), precision (float32), optimizer (fused AdamW), clipping and reports, from one TOML that both read,
vs_torchtitan.toml. interleaved.py has the method, and what a step's time is. A mode is titanlite and torchtitan, started
alike:

    alone        one process
    ddp, fsdp    two ranks: dp_replicate = 2 (torchtitan: DDP), dp_shard = 2 (both: FSDP2)
    tp           two ranks with sequence and loss parallel
    pp           two ranks under 1F1B, four microbatches

torchtitan needs a GPU; torchtitan_cpu.py has what is replaced at run time to run it without one, and why context
parallelism is not among the modes: torchtitan cannot run it on a CPU.

torchtitan goes into an environment of its own, with triton, which it imports also where there is no GPU (there, install
the CPU's build of torch first, as README.md has it):

    python -m venv titan
    titan/bin/pip install -c constraints.txt torch triton torchtitan==0.2.2

    python benchmarks/vs_torchtitan.py --torchtitan-python titan/bin/python [--rounds N] [--steps N] [--modes alone ...]
    python benchmarks/vs_torchtitan.py --torchtitan-python titan/bin/python --device cuda [--flavor F] [--sequences N]
    the same with --dry-run: both programs check their options, and the commands are shown

On one GPU (only the mode alone): Llama 3 8B, sequences of 4096, weights, gradients and moments in bfloat16, which is
what fits, every block recomputed in full, blocks and loss compiled, on both sides.

Prints for each mode: tokens/s (median over all steps but the first two of a launch), peak memory (resident and summed
over ranks, or reserved on the GPU; median over launches), seconds from launch to the end of the first step (median over
launches); and the medians of the ratios of neighbouring steps and of launches, titanlite over torchtitan. Above 1 is
better for tokens/s, below 1 for the others. Before that, a line of JSON a launch: its peaks and first steps, the
seconds of each pair of steps, the first and the last loss of each side. It stops if the sides' parameters or batches
differ, or a loss does not fall.

What is not the same: initial weights; which pieces of the same text are read; norms, which torchtitan decays too. And
two things that torchtitan 0.2.2 does to gradients, neither of which changes what a step costs: under DDP they are
averaged over ranks although the loss was divided by the tokens of all ranks, so they come out halved; in a pipeline
they are those of the sum over tokens, not of the mean, so clipping always cuts them down. Its norms show both.
"""

import os
import platform
import shlex
import subprocess
import sys

import torch
from interleaved import ROOT, Options, Program, compare, parser, program

from titanlite.config import Launch, check, load

TOML = ROOT / "benchmarks" / "vs_torchtitan.toml"
LAUNCHER = ROOT / "benchmarks" / "torchtitan_cpu.py"
CPU_SEQ_LEN, GPU_SEQ_LEN = 512, 4096

MODES: dict[str, tuple[int, Options]] = {
    "alone": (1, {}),
    # Replicas that keep their gathered weights are titanlite's DDP; torchtitan's own DDP has nothing to keep.
    "ddp": (
        2,
        {
            "parallelism.data_parallel_replicate_degree": 2,
            "parallelism.data_parallel_shard_degree": 1,
            "parallelism.fsdp_reshard_after_forward": "never",
        },
    ),
    "fsdp": (2, {"parallelism.data_parallel_shard_degree": 2}),
    "tp": (2, {"parallelism.tensor_parallel_degree": 2}),
    "pp": (2, {"parallelism.pipeline_parallel_degree": 2}),
}

# What the same model is called: (titanlite's options, torchtitan's).
FLAVORS: dict[str, tuple[Options, Options]] = {
    "debug": (
        {
            "model.flavor": "debug",
            "model.n_kv_heads": 16,
            "model.vocab_size": 2048,
            "model.rope_theta": 500_000,
            "model.rope_scaling_factor": 8,
        },
        {"model.flavor": "debugmodel"},
    ),
    "llama3_8b": ({"model.flavor": "llama3_8b"}, {"model.flavor": "8B"}),
}

ON_GPU: Options = {
    "training.seq_len": GPU_SEQ_LEN,
    "training.dtype": "bfloat16",
    "training.mixed_precision_param": "bfloat16",
    "activation_checkpoint.mode": "full",
    "compile.enable": True,
    "optimizer.lr": 3e-4,  # what Llama 3 8B was trained with
}


def options_of(mode: str, sequences: int, steps: int, *, gpu: bool) -> Options:
    """What both sides are told, in the same words."""
    ranks, parallelism = MODES[mode]
    sharers = ranks if mode in ("ddp", "fsdp") else 1
    options: Options = {"training.steps": steps, "training.local_batch_size": sequences // sharers, **parallelism}
    if mode == "pp":
        options["parallelism.pipeline_parallel_microbatch_size"] = sequences // 4
    return options | (ON_GPU if gpu else {})


def sides(
    mode: str, flavor: str, sequences: int, steps: int, *, torchtitan_python: str, gpu: bool
) -> tuple[Program, Program]:
    """titanlite and torchtitan in a mode. Each writes to a folder of its own."""
    ranks, options = MODES[mode][0], options_of(mode, sequences, steps, gpu=gpu)
    ours, theirs = FLAVORS[flavor]
    folder = f"./outputs/vs_torchtitan/{mode}"
    ours = ours | options | {"job.dump_folder": f"{folder}/titanlite"}
    theirs = theirs | options | {"job.dump_folder": f"{folder}/torchtitan", "metrics.disable_color_printing": True}
    theirs["job.config_file"] = str(TOML)
    return (
        program("titanlite", ranks, [str(ROOT / "train.py"), str(TOML)], ours, python=sys.executable),
        program("torchtitan", ranks, [str(LAUNCHER)], theirs, python=torchtitan_python),
    )


def dry_run(mode: str, programs: tuple[Program, Program], *, torchtitan_python: str, gpu: bool) -> None:
    """Show both commands; have each side's own code check its options.

    Raises:
        ConfigError: if titanlite refuses.
        SystemExit: if torchtitan does.
    """
    for one in programs:
        print(f"{mode:6} {one.name:10} {shlex.join(one.command)}\n", flush=True)
    (ours, theirs), ranks = programs, MODES[mode][0]
    check(load(ours.command[ours.command.index(str(TOML)) :]), Launch(0, 0, ranks, ranks, n_devices=int(gpu)))
    options = theirs.command[theirs.command.index(str(LAUNCHER)) + 1 :]
    asked = subprocess.run(
        [torchtitan_python, "-m", "torchtitan.config.manager", *options], capture_output=True, text=True
    )
    if asked.returncode:
        raise SystemExit(asked.stdout + asked.stderr)


def main() -> None:
    options = parser(__doc__, MODES)
    options.add_argument("--torchtitan-python", required=True, help="the Python that torchtitan is installed for")
    options.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    options.add_argument("--flavor", choices=FLAVORS, help="default: debug on a CPU, llama3_8b on a GPU")
    options.add_argument("--sequences", type=int, help="of a step, over all ranks; default: 8 on a CPU, 4 on a GPU")
    options.add_argument("--dry-run", action="store_true", help="check both sides' options and show the commands")
    arguments = options.parse_args()
    gpu = arguments.device == "cuda"
    modes = ["alone"] if gpu and arguments.modes == list(MODES) else arguments.modes
    if gpu and modes != ["alone"]:
        options.error("--device cuda: one GPU has only the mode alone")
    if gpu and not (arguments.dry_run or torch.cuda.is_available()):
        options.error("--device cuda: this host has no GPU; --dry-run checks and shows the commands")
    sequences = arguments.sequences or (4 if gpu else 8)
    if sequences % 4 and modes != ["alone"]:
        options.error(f"--sequences {sequences}: expected a multiple of 4, since ranks and microbatches share them")
    pairs = {
        mode: sides(
            mode,
            arguments.flavor or ("llama3_8b" if gpu else "debug"),
            sequences,
            arguments.steps + 1,  # one more than is taken: the last one is followed by the end
            torchtitan_python=arguments.torchtitan_python,
            gpu=gpu,
        )
        for mode in modes
    }
    if arguments.dry_run:
        for mode, programs in pairs.items():
            dry_run(mode, programs, torchtitan_python=arguments.torchtitan_python, gpu=gpu)
        return
    print(f"{describe_machine(gpu)}, Python {platform.python_version()}; {arguments.rounds} launches of each side")
    print(f"titanlite with torch {torch.__version__}, torchtitan {describe_torchtitan(arguments.torchtitan_python)}")
    tokens = sequences * (GPU_SEQ_LEN if gpu else CPU_SEQ_LEN)
    for mode, programs in pairs.items():
        compare(mode, programs, rounds=arguments.rounds, steps=arguments.steps, tokens=tokens, gpu=gpu)


def describe_machine(gpu: bool) -> str:
    if gpu:
        return torch.cuda.get_device_name()
    return f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"


def describe_torchtitan(python: str) -> str:
    """Its version and its torch's, as its own Python sees them."""
    ask = "from importlib.metadata import version as v; print(v('torchtitan'), 'with torch', v('torch'))"
    return subprocess.run([python, "-c", ask], check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


if __name__ == "__main__":
    main()
