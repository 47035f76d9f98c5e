"""Accelerators by name: what their data sheets promise, and what share of it programs get.

The plan and the MFU of a run read the same table. To add a device, add a row with its source; one that is nobody else's
can be a TOML file with the same keys, named by `plan.device`.
"""

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from titanlite.config.loader import ConfigError, Section, expectation, read_toml, show

GIB, GB, TERA = 2**30, 1e9, 1e12

Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Device(Section):
    """One accelerator of a host, and its links."""

    bf16: Rate
    """Dense matrix products in bfloat16, FLOP/s."""
    fp8: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    """In float8; 0: it has no such products."""
    fp32: Rate
    """In float32."""
    memory: Rate
    """Bytes that a process can use."""
    memory_rate: Rate
    """Of device memory, bytes/s."""
    link: Rate
    """To the other devices of its host, in one direction, bytes/s."""
    network: Rate
    """To other hosts, a device's share in one direction, bytes/s."""
    watts: Rate
    """At full load."""
    devices_per_node: Annotated[int, Field(ge=1)]
    """Devices of a host, unless plan.devices_per_node says otherwise."""
    source: str
    """Where the figures are from."""
    reported_as: str = ""
    """Part of the name by which torch.cuda.get_device_name knows it; empty: none."""


def _device(
    bf16: float, fp8: float, fp32: float, gib: float, rate: float, link: float, network: float, **others: Any
) -> Device:
    """TFLOP/s, GiB, TB/s and GB/s."""
    rates = {"bf16": bf16 * TERA, "fp8": fp8 * TERA, "fp32": fp32 * TERA, "memory_rate": rate * TERA}
    return Device(**rates, link=link * GB, network=network * GB, memory=gib * GIB, **others)


# fp32 is the rate of tensor cores in TF32 where torch does not use them by default, so it is that of the other cores.
# Memory is what the driver reports, some hundred MiB under the nominal figure. Links count one direction, half of what
# vendors print; a network of one 400 Gbit/s adapter a device (200 for A100) is what hosts of eight usually come with.
# fmt: off
DEVICES: dict[str, Device] = {
    #                     bf16   fp8  fp32    GiB   TB/s  link network
    "a100_40":    _device( 312,    0, 19.5,  39.4, 1.555, 300,  25, watts=400, devices_per_node=8,
                          reported_as="A100-SXM4-40GB", source="NVIDIA A100 data sheet, 2021"),
    "a100_80":    _device( 312,    0, 19.5,  79.2, 2.039, 300,  25, watts=400, devices_per_node=8,
                          reported_as="A100", source="NVIDIA A100 data sheet, 2021"),
    "h100_pcie":  _device( 756, 1513, 51.0,  79.2, 2.000,  64,  50, watts=350, devices_per_node=8,
                          reported_as="H100 PCIe", source="NVIDIA H100 data sheet, 2023"),
    "h100_nvl":   _device( 835, 1671, 60.0,  93.1, 3.900, 300,  50, watts=400, devices_per_node=8,
                          reported_as="H100 NVL", source="NVIDIA H100 NVL data sheet, 2024"),
    "h100":       _device( 989, 1979, 67.0,  79.2, 3.350, 450,  50, watts=700, devices_per_node=8,
                          reported_as="H100", source="NVIDIA H100 data sheet (SXM), 2023"),
    "h200":       _device( 989, 1979, 67.0, 139.8, 4.800, 450,  50, watts=700, devices_per_node=8,
                          reported_as="H200", source="NVIDIA H200 data sheet, 2024"),
    "b200":       _device(2250, 4500, 75.0, 178.4, 7.700, 900,  50, watts=1000, devices_per_node=8,
                          reported_as="B200", source="NVIDIA DGX B200 data sheet, 2024"),
    "mi300x":     _device(1307, 2615, 163., 191.7, 5.300, 448,  50, watts=750, devices_per_node=8,
                          reported_as="MI300X", source="AMD MI300X data sheet, 2023"),
    "l40s":       _device( 362,  733, 91.6,  44.4, 0.864,  32,  25, watts=350, devices_per_node=8,
                          reported_as="L40S", source="NVIDIA L40S data sheet, 2023"),
    "rtx_4090":   _device( 165,  330, 82.6,  23.6, 1.008,  32,  25, watts=450, devices_per_node=8,
                          reported_as="RTX 4090", source="NVIDIA Ada whitepaper, 2022: products summed in fp32"),
    # Two cores of a server, and a rank a core: for the shape of a plan on the machine where one develops.
    "cpu":        _device(0.15,    0, 0.15,  8.0, 0.020,    5,   1, watts=15, devices_per_node=64,
                          source="benchmarks/logs: a float32 product on two cores"),
}
# fmt: on


def of_gpu(name: str) -> Device | None:
    """The device that torch.cuda.get_device_name calls this, or None. Rows with the narrower name come first."""
    return next((device for device in DEVICES.values() if device.reported_as and device.reported_as in name), None)


def find(name: str) -> Device:
    """A device by its name here, or from a TOML file with Device's keys (in FLOP/s, bytes, bytes/s).

    Raises:
        ConfigError: if there is none, or a key of the file is missing, unknown or wrong.
    """
    if name in DEVICES:
        return DEVICES[name]
    file = Path(name).expanduser()
    if file.suffix != ".toml":
        raise ConfigError([f'plan.device = "{name}": expected one of {", ".join(DEVICES)}, or a TOML file'])
    try:
        return Device.model_validate(read_toml(str(file)))
    except ValidationError as error:
        raise ConfigError([_problem(file, entry) for entry in error.errors()]) from None


def _problem(file: Path, entry: Any) -> str:
    key = entry["loc"][0]
    if entry["type"] == "extra_forbidden":
        return f"{file}: unknown key {key}; expected {', '.join(Device.model_fields)}"
    expected = f"expected {expectation(Device.model_fields[key])}"
    if entry["type"] == "missing":
        return f"{file}: missing key {key}: {expected}"
    return f"{file}: {key} = {show(entry['input'])}: {expected}"
