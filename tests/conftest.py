"""Pools of ranks: real processes on gloo, started once per world size, which run many test cases."""

import os
import signal
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import Phase, settings

from tests.helpers.data import Assets, built_in_texts
from titanlite.tools.forkserver import forkserver
from titanlite.tools.parity.process_pool import ProcessPool, RankDied

settings.register_profile("mutants", phases=[Phase.explicit, Phase.generate])  # how a mutant fails is not shrunk
MAX_CALLS_PER_POOL, MAX_CALLS_OF_AN_IDLE_POOL = 30, 10


def pytest_configure(config: pytest.Config) -> None:
    """A shell has what it starts in the background ignore SIGINT, and so would the commands that tests interrupt."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked `gpu` are skipped, not failed, where there is none; those marked `nightly` run when asked for."""
    skips = {} if torch.cuda.is_available() else {"gpu": "needs a CUDA device"}
    if "nightly" not in config.getoption("markexpr"):
        skips["nightly"] = "nightly: pytest -m nightly"
    for item in items:
        for mark, reason in skips.items():
            if item.get_closest_marker(mark):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def ranks() -> Iterator["RankPools"]:
    pools = RankPools()
    yield pools
    pools.close()


@pytest.fixture(autouse=True)
def environment_stays() -> Iterator[None]:
    """Restore the environment: a command says there what the Python processes that it starts may import."""
    with mock.patch.dict(os.environ):
        yield


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Compute with one thread: tensors are so small that two threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", autouse=True)
def idle_pools_are_closed(ranks: "RankPools") -> Iterator[None]:
    """Close the pools that would slow down the tests of other files."""
    yield
    for pool in ranks.pools.values():
        if pool.calls > MAX_CALLS_OF_AN_IDLE_POOL or pool.world_size > 4:
            pool.close()


class RankPools:
    """The pools of all world sizes: ranks(2) is that of two ranks, started when a test first asks for it."""

    def __init__(self, timeout_seconds: int | None = None) -> None:
        self.pools: dict[int, ProcessPool] = {}
        self.timeout_seconds = timeout_seconds

    def __call__(self, world_size: int) -> "Retrying":
        return Retrying(self, world_size)

    def pool(self, world_size: int) -> ProcessPool:
        """Return the pool of this world size, a new one after some calls: the process groups of all its layouts remain,
        and gloo has a thread for each that wakes a hundred times a second. Of large pools there is one at a time."""
        for other in self.pools.values():
            if other.world_size not in (world_size, 1, 2, 4):
                other.close()
        pool = self.pools.get(world_size)
        if pool and not pool.broken and pool.calls >= MAX_CALLS_PER_POOL:
            pool.close()
        if not pool or pool.broken:
            forkserver("tests.helpers.preloaded")
            seconds = self.timeout_seconds or (60 if world_size <= 4 else 900)
            self.pools[world_size] = ProcessPool(world_size, timeout_seconds=seconds)
        return self.pools[world_size]

    def close(self) -> None:
        for pool in self.pools.values():
            pool.close()


class Retrying:
    """This class runs a call of a pool again, once and with a warning, if a rank's process died in it.

    Under heavy load, a process of a long-lived pool has died of a corrupted heap in a thread of gloo
    (benchmarks/NOTEBOOK.md). A wrong result or an exception never leads to a retry.
    """

    def __init__(self, pools: RankPools, world_size: int):
        self.pools, self.world_size = pools, world_size

    def run(self, call: Callable[..., Any], **arguments: Any) -> list[Any]:
        try:
            return self.pools.pool(self.world_size).run(call, **arguments)
        except RankDied as error:
            warnings.warn(f"a rank died, the call is run again: {error}", stacklevel=2)
            return self.pools.pool(self.world_size).run(call, **arguments)


@pytest.fixture
def offline(monkeypatch, tmp_path_factory) -> None:
    """`datasets` neither asks the hub nor writes outside of the tests' folder."""
    import datasets
    import huggingface_hub

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.getbasetemp() / "datasets")


@pytest.fixture(scope="session")
def trained_tokenizer() -> str:
    """A tokenizer.json: byte-level BPE on some of the built-in text, whose own template begins a text with <s>."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special_tokens, alphabet = ["<s>", "</s>", "<stop>"], pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special_tokens, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(built_in_texts()[:10], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer.to_str()


@pytest.fixture
def assets(tmp_path, trained_tokenizer) -> Assets:
    return Assets(tmp_path, trained_tokenizer)
