"""Read the averages of weights (EMA) from a checkpoint in place of the weights, for export."""

import re
from pathlib import Path

from torch import Tensor

from titanlite.checkpoint.reader import CheckpointReader
from titanlite.config.loader import ConfigError


class AverageReader(CheckpointReader):
    """Reads the average (EMA) of each weight in place of the weight. Raises ConfigError if there are no averages."""

    def __init__(self, path: Path):
        super().__init__(path)
        ends = re.compile(r"optimizer\.state\.(.+)\.ema")
        found = {f"model.{match[1]}": name for name in self.shapes if (match := ends.fullmatch(name))}
        self._averages = {name: each for name, each in found.items() if self.shapes.get(name) == self.shapes[each]}
        if not found or self._averages != found:
            problem = "an average of another shape than its weight" if found else "no average of its weights"
            raise ConfigError([f"{path}: has {problem}; expected a checkpoint of a run with ema.decay above 0"])

    def read(self, name: str) -> Tensor:
        """Return the average of a full weight, in host memory. Buffers have no average and are returned as saved."""
        return super().read(self._averages.get(name, name))
