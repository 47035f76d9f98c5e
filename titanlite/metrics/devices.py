"""Accelerators by name: devices.toml has their data sheets' peak rates, memory and bandwidths, for plans and MFU. A
user may describe another device in a TOML file with the keys of `Device`; plan.device names the file."""

import itertools
import os
from pathlib import Path
from typing import Annotated, Any, Literal, Union

from pydantic import AfterValidator, Field, ValidationError

from titanlite.config.loader import ConfigError, Section, did_you_mean, expectation, read_toml, show

Rate = Annotated[float, Field(ge=1e-18, le=1e30)]  # quotients of rates within these bounds are finite and above 0
TwoRates = Annotated[list[Rate], Field(min_length=2, max_length=2)]
ThreeRates = Annotated[list[Rate], Field(min_length=3, max_length=3)]
FourRates = Annotated[list[Rate], Field(min_length=4, max_length=4)]


def _by_size(points: list[list[float]]) -> list[list[float]]:
    if all(one[0] < other[0] for one, other in itertools.pairwise(points)):
        return points
    raise ValueError("expected points from fewer bytes to more")


Points = Annotated[list[TwoRates], Field(min_length=1), AfterValidator(_by_size)]


def _with_mul(operators: dict[str, list[list[float]]]) -> dict[str, list[list[float]]]:
    if "mul" in operators:
        return operators
    raise ValueError('expected "mul", which stands for all operators that are not named')


class MeasuredCollective(Section):
    """The measured times of a collective in one process group."""

    name: Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "send"]
    ranks: Annotated[int, Field(ge=2)]
    nodes: Annotated[int, Field(ge=1)]
    """Number of nodes of the group's ranks."""
    points: Points
    """Pairs (bytes of the full tensor, seconds), by ascending bytes."""


class Measured(Section):
    """The measurements of `titanlite calibrate` on a device."""

    torch: str
    ranks: Annotated[int, Field(ge=1)]
    """Number of ranks that measured at the same time; on a CPU, ranks share the cores."""
    matmul: dict[Literal["bf16", "fp8", "fp32"], Annotated[list[FourRates], Field(min_length=1)]]
    """For each dtype, a list of (m, n, k, FLOP/s) of matrix products [m, k] x [k, n]."""
    attention: Annotated[list[ThreeRates], Field(min_length=1)]
    """A list of (tokens of a causal sequence, head_dim, FLOP/s of attention's forward)."""
    attention_backward: Annotated[list[ThreeRates], Field(min_length=1)]
    """A list of (tokens of a causal sequence, head_dim, FLOP/s of attention's backward)."""
    operators: Annotated[dict[str, Points], AfterValidator(_with_mul)]
    """Pairs (bytes read and written, seconds) by operator, ascending; "mul" stands for operators without an entry."""
    operator_seconds: Rate
    """Seconds that the host takes to dispatch an operator, with autograd and modules."""
    dtensor_seconds: Rate
    """Seconds that the host takes for an operator on DTensors, not counting its operators on local tensors."""
    slowdown: Annotated[float, Field(ge=0)]
    """The fraction by which a matrix product is slower while a collective runs at the same time."""
    collectives: list[MeasuredCollective]
    spread: dict[str, Annotated[float, Field(ge=0)]]
    """For each group of times in a plan, the fraction by which the group's estimate may be wrong."""


class Device(Section):
    """The figures of an accelerator and its interconnects."""

    bf16: Rate
    """Dense bfloat16 matrix products, FLOP/s."""
    fp8: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    """Dense float8 matrix products, FLOP/s; 0: unsupported."""
    fp32: Rate
    """Float32 matrix products, FLOP/s."""
    memory: Rate
    """Device memory that a process can use, bytes."""
    memory_bandwidth: Rate
    """Bandwidth of device memory, bytes/s."""
    interconnect_bandwidth: Rate
    """Bandwidth to other devices of the same node (such as NVLink), in one direction, bytes/s."""
    network_bandwidth: Rate
    """Bandwidth to other nodes, per device and in one direction, bytes/s."""
    host_bandwidth: Rate = 64e9
    """Bandwidth between host memory and the device, one direction, bytes/s; limits CPU offload and checkpoint saves."""
    host_memory_bandwidth: Rate = 77e9
    """Bandwidth of host memory, per device, bytes/s; limits the CPU's optimizer step under CPU offload."""
    storage_bandwidth: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Bandwidth of a node's writes to the checkpoint folder, bytes/s; 0: unknown, and the plan assumes a range."""
    watts: Rate
    """Power at full load, W."""
    devices_per_node: Annotated[int, Field(ge=1)]
    """Number of devices of a node; plan.devices_per_node = -1 stands for this number."""
    source: str
    """The data sheet or measurement that the figures are from."""
    name_pattern: str = ""
    """A part of the name that torch.cuda.get_device_name returns for this device; empty: the name is unknown."""
    architecture: Literal["ampere", "hopper", "blackwell", "ada", "cdna3"] = "hopper"
    """The architecture whose efficiencies (tools/plan/efficiency.py) a plan uses for a GPU without `measured`."""
    kind: Literal["gpu", "cpu"] = "gpu"
    """cpu: the host runs operators synchronously; gpu: a device runs the operators that the host launches."""
    measured: Union[Measured, None] = None
    """Measurements of `titanlite calibrate`; None: the plan uses the data sheet's rates."""


DEVICES = {
    name: Device.model_validate(values)
    for name, values in read_toml(str(Path(__file__).with_name("devices.toml"))).items()
}


def find_by_gpu_name(name: str) -> Device | None:
    """Return the first device whose name_pattern is in `name`, from torch.cuda.get_device_name; else None."""
    return next((device for device in DEVICES.values() if device.name_pattern and device.name_pattern in name), None)


def find_device(name: str) -> Device:
    """Return the device with a name in DEVICES, or the device of a TOML file with the keys and units of `Device`.
    Raises ConfigError for an unknown name, or a missing, unknown or wrong key of the file."""
    if name in DEVICES:
        return DEVICES[name]
    if (file := Path(os.path.expanduser(name))).suffix != ".toml":
        problem = f"plan.device = {show(name)}: expected one of {', '.join(DEVICES)}, or a TOML file"
        raise ConfigError([problem + did_you_mean(name, DEVICES)])
    try:
        return Device.model_validate(read_toml(str(file)))
    except ValidationError as error:
        raise ConfigError([_problem(file, entry) for entry in error.errors()]) from None


def _problem(file: Path, entry: Any) -> str:
    key = entry["loc"][0]
    if len(entry["loc"]) > 1:
        return f"{file}: {'.'.join(map(str, entry['loc']))}: {entry['msg'].lower()}; calibrate anew"
    if entry["type"] == "extra_forbidden":
        return f"{file}: unknown key {key}; expected {', '.join(Device.model_fields)}"
    where = f"missing key {key}" if entry["type"] == "missing" else f"{key} = {show(entry['input'])}"
    return f"{file}: {where}: expected {expectation(Device.model_fields[key])}"
