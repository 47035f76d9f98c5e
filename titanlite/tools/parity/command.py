"""Compare a config's layout with a single process: loss, gradient norm, every gradient, every updated weight.

The model is shrunk so that it fits this machine; the number of ranks, degrees, schedule, microbatches and precision
options stay. The ranks are processes on this machine's CPUs or, with torchrun ... -m titanlite parity CONFIG.toml
[...], torchrun's ranks. Exit status: 0 equal within rounding; 1 different; 2 the config or launch is wrong.

With --all, a standard set of layouts is compared: each axis alone and in pairs, activation checkpointing, compiled
blocks, gradient accumulation, chunked cross-entropy. With --tolerance, layouts are compared in the config's precision
instead of float64: how far each tensor may be from a single process by rounding, and is. --own FILE.py:NAME: own parts.

With --gates, the config trains a few steps several times, in full size and with its own data and optimizer. A line for
each gate says whether it holds. Repeatability: two runs are equal, bit for bit. Baseline: the run in --baseline FOLDER
equals these two runs. Restart replay: a run that is interrupted at random steps (killed, stopped, killed), and resumes
each time, equals them too. Layout equivalence: a run that resumes under another layout differs by no more than
rounding. All these runs write fingerprints of tensors, and checkpoints, whatever the config says.

With --against FOLDER, one optimizer step of another program is compared with the same step in float64 in this process.
FOLDER contains (docs/verify_your_trainer.md describes each file; programs in examples/verify/ write them):
  config.json, model.safetensors   the model and its weights before the step, as transformers writes them
  batch.safetensors                tokens, targets (-100: none), optionally document_positions: int64 [B, T]
  step.json                        program, dtypes, optimizer, max_norm, degrees, loss, gradient_norm, balance_loss
  gradients.safetensors            optional: before clipping
  weights_after.safetensors        optional
  experts.safetensors              optional: the experts of each token
"""

from __future__ import annotations

import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

from titanlite.config import Config, ConfigError, Launch, LoadedConfig, check, load
from titanlite.config.own import Parts, take_own
from titanlite.config.schema import Comm
from titanlite.launch.arguments import Parser, count
from titanlite.launch.launcher import count_devices, ranks_wanted
from titanlite.tools.parity.shrink import smaller

USAGE = """titanlite parity CONFIG.toml [--section.key=value ...] [--own FILE.py:NAME] [--all] [--steps=3]
                        [--dtype=float64 | --tolerance]
       titanlite parity CONFIG.toml [--section.key=value ...] --gates [--baseline FOLDER] [--steps=12]
       titanlite parity --against FOLDER"""
TIMEOUT_SECONDS = 600
GIB_PER_RANK = 0.15  # memory of a rank with the shrunk model on a CPU; 0.10 to 0.13 GiB were measured


def main(argv: list[str]) -> int:
    """Run `titanlite parity` and return its exit status."""
    parser = Parser(USAGE, __doc__)
    parser.add_argument("--steps", type=count(), help="optimizer steps (default: 3; with --gates 12)")
    parser.add_argument("--dtype", choices=["float64", "float32", "bfloat16", "float16"])
    parser.add_argument("--tolerance", action="store_true", help="compare every tensor in the config's own precision")
    parser.add_argument("--all", action="store_true", help="compare a standard set of layouts, on this machine's CPUs")
    parser.add_argument("--gates", action="store_true", help="compare runs of the config with each other")
    parser.add_argument("--baseline", type=Path, metavar="FOLDER", help="with --gates: a run to compare, or record")
    parser.add_argument("--against", type=Path, metavar="FOLDER", help="a step of another program to compare")
    launched = "WORLD_SIZE" in os.environ
    arguments, config_arguments = parser.parse_known_args(argv)
    if arguments.against is not None:
        if len([each for each in argv if each != "--against"]) != 1:
            raise ConfigError(["command line: --against FOLDER takes no config and no other option"])
        from titanlite.tools.parity.against import run_against  # late import: torch takes seconds

        return run_against(arguments.against)
    if arguments.gates or arguments.baseline:
        return _run_gates(config_arguments, arguments, launched=launched)
    own, config_arguments = take_own(config_arguments)
    loaded = load(config_arguments, own)
    if arguments.tolerance:
        if arguments.all or arguments.dtype:
            raise ConfigError(["command line: --tolerance takes the config's precision: leave out --all and --dtype"])
        dtype, param = loaded.config.training.dtype, loaded.config.training.mixed_precision_param
        arguments.dtype = {"auto": "bfloat16" if dtype == "float32" else dtype}.get(param, param)  # a GPU's precision
    arguments.dtype = arguments.dtype or "float64"
    if arguments.all:
        return _compare_all(config_arguments, own, arguments)
    return _compare(loaded, arguments, launched=launched)


def _compare(loaded: LoadedConfig[Config], arguments: Any, *, launched: bool) -> int:
    """Compare a config's layout with a single process. The ranks are torchrun's, or processes that this one starts."""
    began, launch = time.monotonic(), Launch.from_environment(count_devices() if launched else 0)
    if not launched:
        world_size = ranks_wanted(loaded, os.environ, n_devices=0)
        launch = Launch(0, 0, world_size, world_size, n_devices=0)
        check_memory(loaded.file, world_size)
    config, changes = smaller(loaded, launch, arguments.dtype)
    from titanlite.launch.process_group import device_of, process_group
    from titanlite.metrics.summary import describe_mesh
    from titanlite.tools.parity.compare import print_comparison, print_tolerances, tolerances
    from titanlite.tools.parity.process_pool import run_in_pool
    from titanlite.tools.parity.reference import run_reference

    steps = arguments.steps or 3
    if launch.rank == 0:
        run = f"{launch.world_size} rank(s), {arguments.dtype}, {steps} steps"
        print(f"{loaded.file}: {describe_mesh(config)} = {run}\nshrunk: {', '.join(changes) or 'nothing'}")
        print("running the layout", flush=True)
    if launched:
        from titanlite.tools.parity.training_run import run_layout

        with process_group(launch, Comm(init_timeout_seconds=TIMEOUT_SECONDS, trace_buf_size=0), "."):
            trace = run_layout(config, launch, steps=steps)
    else:
        (trace,) = run_in_pool([config], launch.world_size, steps)
        if isinstance(trace, Exception):
            raise trace
    if launch.rank != 0:
        return 0
    print("running the single-process reference\n", flush=True)
    device = device_of(launch)
    reference = run_reference(config, device, steps=steps)
    show = print_tolerances if arguments.tolerance else print_comparison
    equal = show(reference, trace, tolerances(config, reference, device, steps=steps))
    print(f"{time.monotonic() - began:.0f} s")
    return 0 if equal else 1


def _run_gates(config_arguments: list[str], arguments: Any, *, launched: bool) -> int:
    steps = arguments.steps or 12
    if not arguments.gates:
        raise ConfigError(["command line: --baseline is read only with --gates"])
    if launched or arguments.all or arguments.dtype or arguments.tolerance or steps < 6:
        problem = "expected no torchrun, --all, --dtype or --tolerance, and --steps from 6 on"
        raise ConfigError([f"command line: --gates: {problem}"])
    own, rest = take_own(config_arguments)
    loaded, n_devices = load(rest, own), count_devices()
    ranks = ranks_wanted(loaded, os.environ, n_devices)
    config = check(loaded, Launch(0, 0, ranks, ranks, n_devices))
    from titanlite.tools.parity.gates import run_gates  # late import: torch takes seconds

    return run_gates(config, config_arguments, steps, arguments.baseline)


def _compare_all(config_arguments: list[str], own: Parts, arguments: Any) -> int:
    if "WORLD_SIZE" in os.environ:
        raise ConfigError(["command line: --all starts ranks of its own; leave out torchrun"])
    from titanlite.tools.parity.standard_set import verdicts

    counts = Counter[str]()
    for layout, verdict in verdicts(config_arguments, own, arguments.dtype, arguments.steps or 3):
        print(f"{layout:30} {verdict}", flush=True)
        counts[verdict.partition(":")[0]] += 1
    print(f"{counts['equal']} of {counts.total()} layouts are equal to a single process")
    return 0 if counts["equal"] and counts.keys() <= {"equal", "impossible"} else 1


def check_memory(file: str, world_size: int) -> None:
    needed, free = world_size * GIB_PER_RANK, os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    if needed > free:
        problem = f"{file}: {world_size} ranks need about {needed:.0f} GiB, and this machine has {free:.0f} free"
        action = "lower a data-parallel degree on the command line, or use titanlite parity under torchrun on its nodes"
        raise ConfigError([f"{problem}; {action}"])
