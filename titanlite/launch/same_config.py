"""Check that all ranks have the same config and code: each node reads its own files, which may be old copies."""

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from titanlite.config.differences import differences, shown
from titanlite.config.loader import ConfigError
from titanlite.files.durable import checksum


def code() -> dict[str, str]:
    """Return a hash of each file of the package's code and tables, except configs, by the file's path."""
    root = Path(__file__).parents[2]
    tables = (path for path in root.glob("titanlite/**/*.toml") if "configs" not in path.relative_to(root).parts)
    files = [*root.glob("titanlite/**/*.py"), *tables]
    return {str(path.relative_to(root)): checksum(path.read_bytes()) for path in files}


def require_same(options: Mapping[str, Any]) -> None:
    """Raise ConfigError, the same on all ranks, if options or files of the package differ between ranks."""
    options = {**options, **dict(sorted(code().items()))}
    own_hash = int(checksum(json.dumps(options).encode()), 16) >> 1  # shifted right to fit an int64
    extremes = torch.tensor([own_hash, -own_hash])
    dist.all_reduce(extremes, dist.ReduceOp.MAX)
    if not extremes.sum():
        return
    rank0, gathered = [options], [{} for _ in range(dist.get_world_size())]
    dist.broadcast_object_list(rank0, src=0)
    dist.all_gather_object(gathered, differences(rank0[0], options))
    parts = []
    for key in dict.fromkeys(itertools.chain(*gathered)):
        ranks: dict[str, list[int]] = {}
        for rank, different in enumerate(gathered):
            value = different[key][1] if key in different else rank0[0].get(key)
            ranks.setdefault(shown(value), []).append(rank)
        parts.append(f"{key} = {', '.join(f'{value} on {name_ranks(each)}' for value, each in ranks.items())}")
    what = "code" if parts[-1].startswith("titanlite/") else "config"
    parts[8:] = [f"{len(parts) - 8} more"] if len(parts) > 9 else parts[8:]
    raise ConfigError([f"the {what} differs between ranks: {'; '.join(parts)}; start all nodes with the same {what}"])


def name_ranks(ranks: list[int]) -> str:
    """Return ascending rank numbers as text, such as "ranks 0-3, 8"."""
    texts, position = [], itertools.count()
    for _, run in itertools.groupby(ranks, lambda rank: rank - next(position)):
        first, *others = run
        texts.append(f"{first}-{others[-1]}" if others else f"{first}")
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(texts)}"
