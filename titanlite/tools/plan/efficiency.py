"""The share of a data sheet's rates that programs reach, by architecture, with the spread of published figures, from
efficiency.toml. The plan uses these shares for a device that was not calibrated. Each row names its source.

Rates depend on sizes. A matrix product takes time to start, keeps all multiprocessors busy only in full waves of tiles,
and writes its result at the end. Attention reaches half of its rate at `half_length` tokens. A collective has a latency
and a bandwidth, which falls with the number of nodes.
"""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pydantic

from titanlite.config.loader import read_toml


class Share(NamedTuple):
    """A share of a rate, or seconds: the expected value, and the least and the most that were published."""

    expected: float
    low: float
    high: float
    source: str


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
    memory: Share
    interconnect: Share
    interconnect_reduce: Share | None = None
    latency: Share


_TABLES = read_toml(str(Path(__file__).with_name("efficiency.toml")))
ANY = SimpleNamespace(**{key: Share(*row) for key, row in _TABLES.pop("any").items()})  # for any architecture
EFFICIENCY = {name: Efficiency(**rows) for name, rows in _TABLES.items()}
TILE = 128  # rows and columns of a tile of a matrix product's result
