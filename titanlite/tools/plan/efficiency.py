"""The shares of a data sheet's rates that programs reach, by architecture, with the spread of published figures, read
from efficiency.toml. The plan uses the shares for a device that was not calibrated.

Rates depend on the sizes of operands. A matrix product takes time to start, keeps all multiprocessors busy only in full
waves of tiles, and writes its result at the end. Attention reaches half of its rate at `half_length` keys. A collective
has a latency, and a bandwidth that is lower for more nodes."""

from collections.abc import Sequence
from pathlib import Path
from statistics import NormalDist
from types import SimpleNamespace
from typing import NamedTuple

import pydantic

from titanlite.config.loader import read_toml
from titanlite.metrics.devices import Device


class Share(NamedTuple):
    """A share of a rate, or seconds: the expected value, and the lowest and highest published value. `of` names the
    devices on which the value was measured, separated by spaces; "": the value is an estimate."""

    expected: float
    low: float
    high: float
    source: str
    of: str = ""

    def basis(self, name: str) -> str:
        """Return whether the value was measured on the device `name`, measured on another device, or estimated."""
        return "an estimate" if not self.of else "measured" if name in self.of.split() else "measured on another device"


class Efficiency(pydantic.BaseModel):
    """The shares that an architecture reaches; efficiency.toml describes each field."""

    multiprocessors: int
    matmul: Share
    matmul_fp8: Share | None = None
    flash: Share
    flash_backward: Share
    cudnn: Share | None = None
    cudnn_backward: Share | None = None
    half_length: Sequence[int]
    attention_tile: int = 128
    memory: Share
    interconnect: Share
    interconnect_reduce: Share | None = None
    latency: Share


_TABLES = read_toml(str(Path(__file__).with_name("efficiency.toml")))
ANY = SimpleNamespace(**{key: Share(*row) for key, row in _TABLES.pop("any").items()})  # rates for all architectures
_OF_DEVICES = _TABLES.pop("devices")
EFFICIENCY = {name: Efficiency(**rows) for name, rows in _TABLES.items()}
TILE = 128  # rows and columns of a tile of a matrix product's result
WIDER = 0.1  # fraction by which both ends of a range move outwards if the rate was measured on another device


def reached(device: Device, name: str) -> Efficiency:
    """Return the shares of rates that a device reaches. A share that was measured on another device of its architecture
    has a wider range. `name`: the name of the device in devices.toml, or of its file."""
    table = _TABLES[device.architecture if device.kind == "gpu" else "cpu"]
    shares = Efficiency(**(table | _OF_DEVICES.get(name, {})))
    wider = {
        key: share._replace(low=share.low * (1 - WIDER), high=share.high * (1 + WIDER))
        for key, share in shares
        if isinstance(share, Share) and share.basis(name) == "measured on another device"
    }
    return shares.model_copy(update=wider)


def slowest_of(n: int, spread: float) -> float:
    """Return the time of the slowest of n devices, for which all others wait, as a multiple of the mean time. The times
    have a normal distribution with the standard deviation `spread`; a quantile approximates the expected maximum."""
    return 1 + spread * NormalDist().inv_cdf((n - 0.375) / (n + 0.25))
