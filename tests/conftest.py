"""Pools of ranks: real processes on gloo, started once per world size and fed cases."""

from collections.abc import Iterator

import pytest
import torch

from titanlite.ranks import Pool


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked `gpu` are skipped, not failed, where there is none; those marked `nightly` run when asked for."""
    skips = {} if torch.cuda.is_available() else {"gpu": "needs a CUDA device"}
    if "nightly" not in config.getoption("markexpr"):
        skips["nightly"] = "many ranks: pytest -m nightly"
    for item in items:
        for mark, reason in skips.items():
            if item.get_closest_marker(mark):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def ranks() -> Iterator["RankPools"]:
    pools = RankPools()
    yield pools
    pools.close()


class RankPools:
    """ranks(2) is the pool of two ranks, started when a test first asks for it."""

    def __init__(self) -> None:
        self.pools: dict[int, Pool] = {}

    def __call__(self, world_size: int) -> Pool:
        if world_size not in self.pools or self.pools[world_size].broken:
            self.pools[world_size] = Pool(world_size)
        return self.pools[world_size]

    def close(self) -> None:
        for pool in self.pools.values():
            pool.close()
