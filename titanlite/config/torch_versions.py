"""Rules for bugs of old torch versions. Delete a rule once pyproject.toml requires a torch without the bug."""

import importlib.metadata

from titanlite.config.keys import EXPERT, SCHEDULE
from titanlite.config.loader import Rejections, show
from titanlite.config.schema import Config
from titanlite.config.stage_split import SPLIT_BACKWARD, V_SHAPED


def torch_version_rules(config: Config, on_cuda: bool, reject: Rejections) -> None:
    """Reject options for which the installed torch has a bug that a newer torch has fixed."""
    parallelism, schedule = config.parallelism, config.parallelism.pipeline_parallel_schedule
    version = tuple(int(number) for number in importlib.metadata.version("torch").split(".")[:2])
    torch = f"torch {version[0]}.{version[1]}"
    if version < (2, 12) and parallelism.pipeline_parallel_degree > 1 and schedule in V_SHAPED and not on_cuda:
        message = f"{torch} lets a rank of a V-shaped schedule send to itself, which gloo cannot; "
        reject(SCHEDULE, message + 'use a newer torch, or "InterleavedZeroBubble"')
    if version < (2, 13) and parallelism.pipeline_parallel_degree > 1 and schedule in SPLIT_BACKWARD:
        message = f"{torch} fails in its split backward under {show(schedule)}; use torch 2.13, or another schedule"
        if config.float8.enable or config.int8.enable:
            reject("float8.enable" if config.float8.enable else "int8.enable", message)
        if parallelism.expert_parallel_degree > 1:
            reject(EXPERT, message)
        if config.training.loss_chunks > 1:
            reject("training.loss_chunks", f"{message}, or loss_chunks = 1")
