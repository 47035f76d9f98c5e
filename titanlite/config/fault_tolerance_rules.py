"""The rules between the options of replica groups and others, and what their launch needs."""

import importlib.util
import os
from typing import Any

from titanlite.config.loader import ConfigError, Rejections, show
from titanlite.config.schema import Config

SECTION = "fault_tolerance"
MAX_GROUPS = 1024


def fault_tolerance_rules(config: Config, reject: Rejections) -> None:
    """Reject options that contradict those of replica groups, or that do not know of other groups."""
    section, on = config.fault_tolerance, f"{SECTION}.enable"
    if not 2 <= section.group_size <= MAX_GROUPS:
        reject(f"{SECTION}.group_size", f"expected 2 to {MAX_GROUPS} replica groups", on)
    elif section.replica_id >= section.group_size:
        message = f"expected a number below {SECTION}.group_size = {section.group_size}"
        reject(f"{SECTION}.replica_id", message, f"{SECTION}.group_size", on)
    elif section.min_replica_size > section.group_size:
        message = f"expected at most {SECTION}.group_size = {section.group_size}"
        reject(f"{SECTION}.min_replica_size", message, f"{SECTION}.group_size", on)
    unsupported = {
        "training.streaming": (config.training.streaming, "the position in a stream is lost with a group; set false"),
        "training.datasets": (config.training.datasets, "the losses of datasets are of one group; use one dataset"),
        "model.moe.n_experts": (config.model.moe.n_experts, "the load of experts is balanced in one group; set 0"),
        "debug.sdc_check_freq": (config.debug.sdc_check_freq, "a step is computed again in one group only; set 0"),
        "float8.precompute_float8_dynamic_scale_for_fsdp": (
            config.float8.precompute_float8_dynamic_scale_for_fsdp,
            "the scales of weights that another group sends are not known; set false",
        ),
    }
    for key, (is_set, message) in unsupported.items():
        if is_set:
            reject(key, f"{message}, or {on} = false", on)
    if section.semi_sync_method == "diloco" and config.training.dtype == "bfloat16":
        method, other = f"{SECTION}.semi_sync_method", "float32"
        reject("training.dtype", f'an outer step is rounded to it; set "{other}", or {method} = "none"', method)


def numerics(config: Config) -> list[Any]:
    """Return the options that decide which weights a run trains, as plain JSON, without where files are."""
    sections = config.model_dump(include={"optimizer", "lr_scheduler", "parallelism", "float8", "int8"})
    training = config.training.model_dump(exclude={"cache_folder", "dataset_path", "gc_freq"})
    own = {"enable", "replica_id", "min_replica_size", "process_group_timeout_ms"}
    groups = config.fault_tolerance.model_dump(exclude=own)
    return [config.model.identity(), training, sections, config.debug.seed, groups]


def require_torchft() -> None:
    """Raise ConfigError if this environment lacks what replica groups need."""
    problems = []
    if not importlib.util.find_spec("torchft"):
        problems.append(f'{SECTION}.enable = true: torchft is not installed; pip install "titanlite[ft]", or set false')
    address = os.environ.get("TORCHFT_LIGHTHOUSE", "")
    if not address.startswith(("http://", "https://")):
        problem = f"environment: TORCHFT_LIGHTHOUSE = {show(address)}: expected the address of torchft's lighthouse"
        problems.append(f"{problem}, as in http://HOST:29510 ({SECTION}.enable = true)")
    if problems:
        raise ConfigError(problems)
