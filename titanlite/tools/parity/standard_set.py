"""Compare a standard set of layouts of a model: each axis alone, pairs of axes, and options that change computation."""

import itertools
from collections.abc import Iterator

import torch

from titanlite.config import Config, ConfigError, Launch, load
from titanlite.config.own import Parts
from titanlite.tools.parity.compare import judge, tolerances
from titanlite.tools.parity.process_pool import run_in_pool
from titanlite.tools.parity.reference import run_reference
from titanlite.tools.parity.shrink import smaller

AXES = {
    "FSDP 2": "data_parallel_shard_degree",
    "replicate 2": "data_parallel_replicate_degree",
    "TP 2": "tensor_parallel_degree",
    "PP 2": "pipeline_parallel_degree",
    "CP 2": "context_parallel_degree",
}
REWRITES = {
    "TP 2, full AC": ["--activation_checkpoint.mode=full"],
    "TP 2, AC by operator": ["--activation_checkpoint.mode=selective"],
    "TP 2, compile": ["--compile.enable"],
    "TP 2, 3 loss chunks": ["--training.loss_chunks=3"],
    "FSDP 2, 2 accumulation steps": ["--training.local_batch_size=2", "--training.global_batch_size=8"],
}
PLAIN = ["--training.local_batch_size=4", "--training.global_batch_size=-1", "--parallelism.expert_parallel_degree=1"]


def layouts() -> Iterator[tuple[str, list[str]]]:
    """Yield the name and the command-line arguments of each layout: first those of two ranks, then those of four."""

    def degrees(*axes: str) -> list[str]:
        return [*PLAIN, *(f"--parallelism.{key}={2 if name in axes else 1}" for name, key in AXES.items())]

    yield from ((axis, degrees(axis)) for axis in AXES)
    yield from ((name, [*degrees(name.partition(",")[0]), *more]) for name, more in REWRITES.items())
    yield from ((" x ".join(pair), degrees(*pair)) for pair in itertools.combinations(AXES, 2))


def verdicts(arguments: list[str], own: Parts, dtype: str, steps: int) -> Iterator[tuple[str, str]]:
    """Yield the name of each layout and a verdict that begins with equal, DIFFERENT, FAILED or impossible (the model or
    the config does not allow the layout). `arguments`: the config file and options, as on the command line."""
    cpu = torch.device("cpu")
    for n_ranks, some in itertools.groupby(layouts(), lambda each: 4 if " x " in each[0] else 2):
        configs: dict[str, Config | str] = {}
        for name, more in some:
            try:
                loaded = load([*arguments, *more], own)
                configs[name] = smaller(loaded, Launch(0, 0, n_ranks, n_ranks, n_devices=0), dtype)[0]
            except ConfigError as error:
                configs[name] = f"impossible: {error.problems[0]}"
        traces = run_in_pool([each for each in configs.values() if isinstance(each, Config)], n_ranks, steps)
        for name, config in configs.items():
            trace = next(traces) if isinstance(config, Config) else config
            if not isinstance(trace, dict):
                yield name, f"FAILED: {f'{trace}'.rstrip().splitlines()[-1]}" if isinstance(trace, Exception) else trace
                continue
            reference = run_reference(config, cpu, steps=steps)
            yield name, judge(reference, trace, tolerances(config, reference, cpu, steps=steps))[-1]
