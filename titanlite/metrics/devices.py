"""Accelerators by name: their data sheets' peak rates, memory and bandwidths.

The plan and the MFU of a run read the same table. To add a device, add a line with its source; a private one can be a
TOML file with the keys of `Device`, named by `plan.device`.
"""

import itertools
from typing import Annotated, Literal, Union

from pydantic import AfterValidator, Field

from titanlite.config.loader import Section

Rate = Annotated[float, Field(ge=1e-18, le=1e30)]  # with these bounds no quotient is 0 or infinite
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
    """Nodes that they are on."""
    points: Points
    """Bytes of the full tensor, and seconds; from fewer bytes to more."""


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
    """The same of the backward."""
    operators: Annotated[dict[str, Points], AfterValidator(_with_mul)]
    """Bytes read and written, and seconds, by operator, from fewer bytes to more; "mul" stands for all that are not
    named."""
    operator_seconds: Rate
    """How long the host takes to dispatch an operator, with autograd and modules, besides the operator itself."""
    dtensor_seconds: Rate
    """How long it takes for an operator on DTensors, besides the operators that this one dispatches."""
    slowdown: Annotated[float, Field(ge=0)]
    """By which share a matrix product is slower while a collective runs beside it."""
    collectives: list[MeasuredCollective]
    spread: dict[str, Annotated[float, Field(ge=0)]]
    """By which share each group of times may differ from what the plan expects."""


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
    """What a node writes to the folder of checkpoints, bytes/s; 0: unknown, the plan assumes a range."""
    watts: Rate
    """Power at full load, W."""
    devices_per_node: Annotated[int, Field(ge=1)]
    """Devices of a node, unless plan.devices_per_node says otherwise."""
    source: str
    """Where the figures are from."""
    name_pattern: str = ""
    """Part of the name that torch.cuda.get_device_name reports; empty: none."""
    architecture: Literal["ampere", "hopper", "blackwell", "ada", "cdna3"] = "hopper"
    """Whose efficiencies the plan takes (tools/plan/efficiency.py); of a CPU and where `measured` is, none."""
    kind: Literal["gpu", "cpu"] = "gpu"
    """cpu: operators run on the host itself, one after the other."""
    measured: Union[Measured, None] = None
    """What `titanlite calibrate` has measured; None: the plan uses the rates above."""


# fmt: off
def _device(
    architecture: str, bf16: float, fp8: float, fp32: float, gib: float,
    memory: float, interconnect: float, network: float, host: float, host_memory: float, watts: float,
    name_pattern: str, source: str, devices_per_node: int = 8, kind: str = "gpu",
) -> Device:
    """Build a device from TFLOP/s, GiB, TB/s of memory, and GB/s of interconnect, network, the link to the host and the
    host's memory."""
    if kind == "gpu":
        source = f"{'AMD' if architecture == 'cdna3' else 'NVIDIA'} {name_pattern} data sheet, {source}"
    return Device(
        bf16=bf16 * 1e12, fp8=fp8 * 1e12, fp32=fp32 * 1e12, memory=gib * 2**30, memory_bandwidth=memory * 1e12,
        interconnect_bandwidth=interconnect * 1e9, network_bandwidth=network * 1e9,
        host_bandwidth=host * 1e9, host_memory_bandwidth=host_memory * 1e9, watts=watts,
        devices_per_node=devices_per_node, source=source, name_pattern=name_pattern, kind=kind,
        architecture=architecture,
    )


# fp32 is the rate of tensor cores in TF32 where torch does not use them by default, so it is that of the other cores.
# Memory is what the driver reports, some hundred MiB under the nominal figure. Interconnects count one direction, half
# of what vendors print, and so do links to the host (PCIe 4 or 5 x16, or NVLink-C2C). Host memory is that of two usual
# CPUs of the year, shared by the devices of a node. A network of one 400 Gbit/s adapter per device (200 for A100) is
# usual in nodes of eight.
DEVICES: dict[str, Device] = {
    #                   architecture bf16   fp8  fp32    GiB   TB/s GB/s GB/s GB/s GB/s watts
    "a100_40":   _device("ampere",    312,    0, 19.5,  39.4, 1.555, 300, 25,  32,  51,  400, "A100-SXM4-40", "2021"),
    "a100_80":   _device("ampere",    312,    0, 19.5,  79.2, 2.039, 300, 25,  32,  51,  400, "A100", "2021"),
    "h100_pcie": _device("hopper",    756, 1513, 51.0,  79.2, 2.000,  64, 50,  64,  77,  350, "H100 PCIe", "2023"),
    "h100_nvl":  _device("hopper",    835, 1671, 60.0,  93.1, 3.900, 300, 50,  64,  77,  400, "H100 NVL", "2024"),
    "h100":      _device("hopper",    989, 1979, 67.0,  79.2, 3.350, 450, 50,  64,  77,  700, "H100", "2023"),
    # A superchip is a GPU or two with a Grace CPU, whose memory and power are not counted. Bridges join four H200 NVL.
    "gh200":     _device("hopper",    989, 1979, 67.0,  94.5, 4.000, 450, 50, 450, 384,  700, "GH200", "2024", 4),
    "h200_nvl":  _device("hopper",    835, 1671, 60.0, 139.8, 4.800, 450, 50,  64,  77,  600, "H200 NVL", "2024", 4),
    "h200":      _device("hopper",    989, 1979, 67.0, 139.8, 4.800, 450, 50,  64,  77,  700, "H200", "2024"),
    "gb200":     _device("blackwell", 2500, 5000, 80.0, 184.3, 8.000, 900, 50, 225, 256, 1200, "GB200", "2024", 72),
    "b200":      _device("blackwell", 2250, 4500, 75.0, 178.4, 7.700, 900, 50,  64,  77, 1000, "B200", "2024"),
    "mi300x":    _device("cdna3",    1307, 2615, 163., 191.7, 5.300, 448, 50,  64, 115,  750, "MI300X", "2023"),
    "l40s":      _device("ada",       362,  733, 91.6,  44.4, 0.864,  32, 25,  32,  77,  350, "L40S", "2023"),
    # The data sheet is the whitepaper of the architecture.
    "rtx_4090":  _device("ada",       165,  330, 82.6,  23.6, 1.008,  32, 25,  32,  51,  450, "RTX 4090", "2022"),
    # Two cores of a server, one rank per core, for plans of the machine where one develops.
    "cpu":       _device("hopper",   0.15,    0, 0.15,   8.0, 0.020,   5,  1,   5,  10, 15, "", "a product", 64, "cpu"),
}
# fmt: on


def find_by_gpu_name(name: str) -> Device | None:
    """Return the device whose name torch.cuda.get_device_name reports, or None; narrower patterns stand first."""
    return next((device for device in DEVICES.values() if device.name_pattern and device.name_pattern in name), None)
