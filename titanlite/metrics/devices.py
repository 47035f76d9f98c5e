"""Accelerators by name: their data sheets' peak rates, memory and bandwidths, from devices.toml.

The plan and the MFU of a run read the same table. A private device can be a TOML file with the keys of `Device`, named
by `plan.device`.
"""

import itertools
import os
from pathlib import Path
from typing import Annotated, Any, Literal, Union

from pydantic import AfterValidator, Field, ValidationError

from titanlite.config.loader import ConfigError, Section, did_you_mean, expectation, read_toml, show

Rate = Annotated[float, Field(ge=1e-18, le=1e30)]  # these bounds keep quotients finite and above 0
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
    """How long a collective takes in one process group."""

    name: Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "send"]
    ranks: Annotated[int, Field(ge=2)]
    """Ranks of the group."""
    nodes: Annotated[int, Field(ge=1)]
    """Nodes that these ranks are on."""
    points: Points
    """Pairs of the bytes of the full tensor and the seconds, in ascending order of bytes."""


class Measured(Section):
    """What `titanlite calibrate` has measured on a device."""

    torch: str
    """Version of PyTorch."""
    ranks: Annotated[int, Field(ge=1)]
    """Ranks that measured at the same time. On a CPU they share its cores."""
    matmul: dict[Literal["bf16", "fp8", "fp32"], Annotated[list[FourRates], Field(min_length=1)]]
    """m, n and k of a product [m, k] x [k, n], and its FLOP/s, by data type."""
    attention: Annotated[list[ThreeRates], Field(min_length=1)]
    """Tokens of a causal sequence, head_dim, and FLOP/s of the forward."""
    attention_backward: Annotated[list[ThreeRates], Field(min_length=1)]
    """The same for the backward."""
    operators: Annotated[dict[str, Points], AfterValidator(_with_mul)]
    """Bytes read and written, and seconds, by operator, from fewer bytes to more; "mul" stands for all that are not
    named."""
    operator_seconds: Rate
    """How long the host takes to dispatch an operator, with autograd and modules, besides the operator itself."""
    dtensor_seconds: Rate
    """How long the host takes for an operator on DTensors, besides the operators that this operator dispatches."""
    slowdown: Annotated[float, Field(ge=0)]
    """The fraction by which a matrix product is slower while a collective runs at the same time."""
    collectives: list[MeasuredCollective]
    spread: dict[str, Annotated[float, Field(ge=0)]]
    """The fraction by which each group of times may differ from what the plan expects."""


class Device(Section):
    """One accelerator of a node, and its interconnects."""

    bf16: Rate
    """Dense bfloat16 matrix products, FLOP/s."""
    fp8: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    """Dense float8 matrix products, FLOP/s; 0: unsupported."""
    fp32: Rate
    """Float32 matrix products, FLOP/s."""
    memory: Rate
    """Memory that a process can use, bytes."""
    memory_bandwidth: Rate
    """Bandwidth of device memory, bytes/s."""
    interconnect_bandwidth: Rate
    """Bandwidth to the other devices of the node (NVLink or the like), in one direction, bytes/s."""
    network_bandwidth: Rate
    """Bandwidth to other nodes, per device and in one direction, bytes/s."""
    host_bandwidth: Rate = 64e9
    """Bandwidth between host memory and the device, in one direction, bytes/s: what CPU offload and saving copy."""
    host_memory_bandwidth: Rate = 77e9
    """Bandwidth of the node's host memory, per device, bytes/s: the CPU's optimizer step under CPU offload."""
    storage_bandwidth: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Bandwidth of a node's writes to the folder of checkpoints, bytes/s; 0: unknown, the plan assumes a range."""
    watts: Rate
    """Power at full load, W."""
    devices_per_node: Annotated[int, Field(ge=1)]
    """Devices of a node, unless plan.devices_per_node says otherwise."""
    source: str
    """The source of the figures."""
    name_pattern: str = ""
    """Part of the name that torch.cuda.get_device_name reports; empty: none."""
    architecture: Literal["ampere", "hopper", "blackwell", "ada", "cdna3"] = "hopper"
    """Architecture whose efficiencies the plan uses (tools/plan/efficiency.py), except for a CPU or with `measured`."""
    kind: Literal["gpu", "cpu"] = "gpu"
    """cpu: operators run on the host itself, one after the other."""
    measured: Union[Measured, None] = None
    """What `titanlite calibrate` has measured; None: the plan uses the rates above."""


DEVICES = {
    name: Device.model_validate(values)
    for name, values in read_toml(str(Path(__file__).with_name("devices.toml"))).items()
}


def find_by_gpu_name(name: str) -> Device | None:
    """Return the device whose name torch.cuda.get_device_name reports, or None. Narrower patterns come first."""
    return next((device for device in DEVICES.values() if device.name_pattern and device.name_pattern in name), None)


def find_device(name: str) -> Device:
    """Return a device by its name in DEVICES, or from a TOML file with the keys and units of `Device`.

    Raises ConfigError if there is none, or a key of the file is missing, unknown or wrong."""
    if name in DEVICES:
        return DEVICES[name]
    file = Path(os.path.expanduser(name))
    if file.suffix != ".toml":
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
