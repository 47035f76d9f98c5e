"""Compare titanlite with torchtitan 0.2.2 in throughput and memory, on the CPU of this machine or on one GPU.

Both programs train the same Llama (on a CPU 6,163,712 parameters: torchtitan's "debugmodel") with the same sequence
length, global batch (8 x 512 tokens), precision (float32), optimizer (fused AdamW), gradient clipping and logging.
Both read the same TOML file, vs_torchtitan.toml. interleaved.py has the method and the definition of a step's time. A
mode runs titanlite and torchtitan under the same launch:

    alone        one process
    ddp, fsdp    two ranks: dp_replicate = 2 (torchtitan: DDP), dp_shard = 2 (both: FSDP2)
    tp           two ranks with tensor, sequence and loss parallelism
    pp           two ranks under 1F1B with four microbatches

torchtitan needs a GPU. torchtitan_cpu.py lists what it replaces at run time to run without one, and why torchtitan
cannot run context parallelism on a CPU.

Install torchtitan into an environment of its own, with triton, which it also imports where there is no GPU. Without a
GPU, install the CPU build of torch first, as README.md shows:

    python -m venv titan
    titan/bin/pip install -c constraints.txt torch triton torchtitan==0.2.2

    python -m benchmarks.others.vs_torchtitan --torchtitan-python titan/bin/python [--rounds N] [--steps N]
                                                [--modes alone ...] [--compiled]
    python -m benchmarks.others.vs_torchtitan --torchtitan-python titan/bin/python --device cuda
                                                [--flavor F] [--sequences N]
    python -m benchmarks.others.vs_torchtitan --checkout FOLDER [...]     with another checkout of titanlite instead
    the same with --dry-run: both programs check their options, and the commands are printed

On one GPU there is only the mode alone: Llama 3 8B with sequences of 4096; weights, gradients and optimizer states in
bfloat16, which is what fits; full activation checkpointing; compiled blocks and loss, in both programs.

The results of a mode are throughput in tokens per second (median over the steps of all launches, without the first
two steps of each), peak memory (resident and summed over the ranks, or reserved on the GPU; median over launches), and
the seconds from the launch to the end of the first step (median over launches). Each has the median of the ratios of
neighbouring steps or of launches, titanlite over torchtitan: above 1 is better for tokens/s, below 1 for the others.
Before the results, each launch prints a JSON line with its peaks, its first steps, the seconds of each pair of steps,
and the first and last loss of each program. The benchmark stops if parameters or batches differ, or if a loss does not
fall.

Three things differ: the initial weights, the sequences drawn from the same text, and weight decay of the norms, which
only torchtitan applies. torchtitan 0.2.2 also computes other gradients in two modes, at no difference in cost. Under
DDP it averages them over ranks although the loss was divided by the tokens of all ranks, so they are half as large. In
a pipeline they belong to the sum over tokens and not to the mean, so clipping always scales them down. Its gradient
norms show both.
"""

import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path

import torch

from benchmarks.others.interleaved import Options, Program, compare, parser, program
from benchmarks.python_path import ROOT
from titanlite.config import Launch, check, load

TOML = ROOT / "benchmarks" / "others" / "vs_torchtitan.toml"
LAUNCHER = ROOT / "benchmarks" / "others" / "torchtitan_cpu.py"
CPU_SEQ_LEN, GPU_SEQ_LEN = 512, 4096

MODES: dict[str, tuple[int, Options]] = {
    "alone": (1, {}),
    # titanlite's DDP is replicas whose gathered weights stay resident; torchtitan's DDP never shards them.
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

# The same model in the words of each program: (titanlite's options, torchtitan's options).
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


def options_of(mode: str, sequences: int, steps: int, *, gpu: bool, compiled: bool) -> Options:
    """Return the options that both programs share by name."""
    ranks, parallelism = MODES[mode]
    data_ranks = ranks if mode in ("ddp", "fsdp") else 1
    options: Options = {"training.steps": steps, "training.local_batch_size": sequences // data_ranks, **parallelism}
    if mode == "pp":
        options["parallelism.pipeline_parallel_microbatch_size"] = sequences // 4
    return options | ({"compile.enable": True} if compiled else {}) | (ON_GPU if gpu else {})


def programs_of(
    mode: str,
    flavor: str,
    sequences: int,
    steps: int,
    *,
    torchtitan_python: str | None,
    checkout: Path | None,
    gpu: bool,
    compiled: bool,
) -> tuple[Program, Program]:
    """Return the commands of titanlite and of torchtitan, or of another checkout of titanlite, for a mode; each writes
    to its own folder."""
    ranks, options = MODES[mode][0], options_of(mode, sequences, steps, gpu=gpu, compiled=compiled)
    titanlite_model, torchtitan_model = FLAVORS[flavor]
    folder = f"./outputs/vs_torchtitan/{mode}"
    titanlite = titanlite_model | options | {"job.dump_folder": f"{folder}/titanlite"}
    torchtitan = torchtitan_model | options | {"job.dump_folder": f"{folder}/torchtitan"}
    torchtitan |= {"metrics.disable_color_printing": True, "job.config_file": str(TOML)}
    ours = program("titanlite", ranks, [str(ROOT / "train.py"), str(TOML)], titanlite, python=sys.executable)
    if checkout:
        other = titanlite | {"job.dump_folder": f"{folder}/checkout"}
        script = [str(checkout.resolve() / "train.py"), str(TOML)]
        return ours, program("checkout", ranks, script, other, python=sys.executable)
    return ours, program("torchtitan", ranks, [str(LAUNCHER)], torchtitan, python=torchtitan_python)


def dry_run(mode: str, programs: tuple[Program, Program], *, torchtitan_python: str, gpu: bool) -> None:
    """Print both commands and let each program check its own options.

    Raises:
        ConfigError: if titanlite rejects its options.
        SystemExit: if torchtitan rejects its options.
    """
    for name, _, command in programs:
        print(f"{mode:6} {name:10} {shlex.join(command)}\n", flush=True)
    (titanlite, torchtitan), ranks = programs, MODES[mode][0]
    check(load(titanlite.command[titanlite.command.index(str(TOML)) :]), Launch(0, 0, ranks, ranks, n_devices=int(gpu)))
    options = torchtitan.command[torchtitan.command.index(str(LAUNCHER)) + 1 :]
    result = subprocess.run(
        [torchtitan_python, "-m", "torchtitan.config.manager", *options], capture_output=True, text=True
    )
    if result.returncode:
        raise SystemExit(result.stdout + result.stderr)


def main() -> None:
    options = parser(__doc__, MODES)
    others = options.add_mutually_exclusive_group(required=True)
    others.add_argument("--torchtitan-python", help="Python of torchtitan's environment")
    others.add_argument("--checkout", type=Path, help="another checkout of titanlite, to compare with instead")
    options.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    options.add_argument("--flavor", choices=FLAVORS, help="default: debug on a CPU, llama3_8b on a GPU")
    options.add_argument("--sequences", type=int, help="global batch size; default: 8 on a CPU, 4 on a GPU")
    options.add_argument("--compiled", action="store_true", help="compile blocks and loss in both programs")
    options.add_argument("--dry-run", action="store_true", help="check both programs' options and print the commands")
    arguments = options.parse_args()
    gpu = arguments.device == "cuda"
    modes = ["alone"] if gpu and arguments.modes == list(MODES) else arguments.modes
    if gpu and modes != ["alone"]:
        options.error("--device cuda: one GPU has only the mode alone")
    if gpu and not (arguments.dry_run or torch.cuda.is_available()):
        options.error("--device cuda: this machine has no GPU; --dry-run checks and prints the commands")
    sequences = arguments.sequences or (4 if gpu else 8)
    if sequences % 4 and modes != ["alone"]:
        options.error(f"--sequences {sequences}: expected a multiple of 4, to be split over ranks and microbatches")
    pairs = {
        mode: programs_of(
            mode,
            arguments.flavor or ("llama3_8b" if gpu else "debug"),
            sequences,
            arguments.steps + 1,  # one more than is measured: the program ends after its last step
            torchtitan_python=arguments.torchtitan_python,
            checkout=arguments.checkout,
            gpu=gpu,
            compiled=arguments.compiled,
        )
        for mode in modes
    }
    if arguments.dry_run:
        if arguments.checkout:
            options.error("--dry-run: checks torchtitan's options, and a checkout has none")
        for mode, programs in pairs.items():
            dry_run(mode, programs, torchtitan_python=arguments.torchtitan_python, gpu=gpu)
        return
    print(f"{describe_machine(gpu)}, Python {platform.python_version()}; {arguments.rounds} launches of each program")
    other = describe_torchtitan(arguments.torchtitan_python) if arguments.torchtitan_python else arguments.checkout
    print(f"titanlite with torch {torch.__version__}, compared with {other}")
    tokens = sequences * (GPU_SEQ_LEN if gpu else CPU_SEQ_LEN)
    for mode, programs in pairs.items():
        compare(mode, programs, rounds=arguments.rounds, steps=arguments.steps, tokens=tokens, gpu=gpu)


def describe_machine(gpu: bool) -> str:
    if gpu:
        return torch.cuda.get_device_name()
    return f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"


def describe_torchtitan(python: str) -> str:
    """Return the versions of torchtitan and of its torch, as its own Python reports them."""
    code = "from importlib.metadata import version as v; print('torchtitan', v('torchtitan'), 'with torch', v('torch'))"
    return subprocess.run([python, "-c", code], check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


if __name__ == "__main__":
    main()
