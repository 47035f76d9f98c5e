"""The share of a data sheet's rates that programs reach, by architecture, with the spread of published figures, from
efficiency.toml. The plan uses these shares for a device that was not calibrated. Each row names its source.

Rates depend on sizes. A matrix product takes time to start, keeps all multiprocessors busy only in full waves of tiles,
and writes its result at the end. Attention reaches half of its rate at `half_length` tokens. A collective has a latency
and a bandwidth, which falls with the number of nodes.
"""

from collections.abc import Sequence
from pathlib import Path
from statistics import NormalDist
from types import SimpleNamespace
from typing import NamedTuple

import pydantic

from titanlite.config.loader import read_toml
from titanlite.metrics.devices import Device


class Share(NamedTuple):
    """A share of a rate, or seconds: the expected value, and the least and the most that were published. `of` names the
    devices that the figure was measured on, separated by spaces; "": an estimate."""

    expected: float
    low: float
    high: float
    source: str
    of: str = ""

    def basis(self, name: str) -> str:
        """Return what the figure is for the device with that name."""
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
ANY = SimpleNamespace(**{key: Share(*row) for key, row in _TABLES.pop("any").items()})  # architecture: any
_OF_DEVICES = _TABLES.pop("devices")
EFFICIENCY = {name: Efficiency(**rows) for name, rows in _TABLES.items()}
TILE = 128  # rows and columns of a tile of a matrix product's result
WIDER = 0.1  # fraction by which an end of a range is farther off if the rate was measured on another device


def reached(device: Device, name: str) -> Efficiency:
    """Return the shares of rates that a device reaches: its own, or else its architecture's with wider ranges. `name`
    is the name of the device's table or file."""
    table = _TABLES[device.architecture if device.kind == "gpu" else "cpu"]
    shares = Efficiency(**(table | _OF_DEVICES.get(name, {})))
    wider = {
        key: share._replace(low=share.low * (1 - WIDER), high=share.high * (1 + WIDER))
        for key, share in shares
        if isinstance(share, Share) and share.basis(name) == "measured on another device"
    }
    return shares.model_copy(update=wider)


def slowest_of(n: int, spread: float) -> float:
    """Return by which factor the slowest of n devices, for which all wait in a step, is slower than their mean, if the
    times have a normal distribution with a standard deviation of `spread` (approximated by a quantile)."""
    return 1 + spread * NormalDist().inv_cdf((n - 0.375) / (n + 0.25))
