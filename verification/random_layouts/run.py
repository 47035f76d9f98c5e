"""Run a layout on a pool of ranks and compare it with the single-process reference."""

import contextlib
import dataclasses
import itertools
import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from tests.conftest import RankPools, Retrying
from tests.parallel.test_parity import CPU, Bug
from titanlite.config import Config, ConfigError, Launch
from titanlite.config.errors import TrainingError
from titanlite.data.open import build_tokenizer, open_sequences
from titanlite.data.packing import Sequence
from titanlite.tools.parity import reference, training_run
from titanlite.tools.parity.compare import FLOAT64_TOLERANCE, differences, tolerances
from titanlite.tools.parity.process_pool import RankError
from titanlite.tools.parity.reference import RandomSequences, Trace
from verification.random_layouts.draw import Layout
from verification.random_layouts.rejected import wrong_lines

STEPS = 2
EQUAL, DIFFERS, REJECTED = "equal", "differs", "rejected late"
TIMEOUT_SECONDS = 240
"""Of a collective: a layout whose other ranks have failed ends after that."""
CONSEQUENCES = re.compile("no answer|Connection (closed|reset)|Timed out|timed out")
"""What ranks raise because another one has failed."""


@dataclasses.dataclass(frozen=True)
class Result:
    """How a layout compares with the reference."""

    kind: str
    """EQUAL, DIFFERS, REJECTED (after the config was accepted), or the name of an exception."""
    difference: float = 0.0
    """The difference of the entry that is the largest relative to what is allowed."""
    allowed: float = 0.0
    where: str = ""
    """That entry, or the first that differs; or the last line of the exception."""
    seconds: float = 0.0

    @property
    def is_right(self) -> bool:
        """Whether the layout is equal to the reference, or was rejected in lines, when it was built."""
        return self.kind == EQUAL or (self.kind == REJECTED and not wrong_lines(self.where.split("; ")[:1]))

    def __str__(self) -> str:
        if self.kind in (EQUAL, DIFFERS):
            return f"{self.kind} | {self.difference:.1e} of {self.allowed:.1e} allowed, {self.where}"
        return f"{self.kind} | {self.where}"


class TextSequences:
    """The sequences of the config's own dataset, in place of random tokens. The first rank builds the token cache."""

    def __init__(self, config: Config):
        options = {"seed": config.debug.seed, "builds_cache": not dist.is_initialized() or dist.get_rank() == 0}
        train, *_ = open_sequences(build_tokenizer(""), config.training, config.validation, **options)
        self.sequences: Any = train.resumed(None) if config.training.datasets else train
        self.names = tuple(self.sequences.names) if config.training.datasets else ("text",)
        self._reader, self._known = self.sequences.read(0, 1), list[Sequence]()

    def __getitem__(self, index: int) -> Sequence:
        self._known += [sequence for sequence, _ in itertools.islice(self._reader, index + 1 - len(self._known))]
        return self._known[index]

    def read(self, first: int, stride: int) -> Any:
        return ((sequence, None) for sequence, _ in self.sequences.read(first, stride))

    datasets_of = RandomSequences.datasets_of  # as the reference counts them


@contextlib.contextmanager
def data_of(config: Config) -> Iterator[None]:
    """Have the reference and layouts train on the config's dataset if it has one, else on random tokens."""
    kind = TextSequences if config.training.datasets or config.training.dataset_path else RandomSequences
    with (
        mock.patch.object(reference, "RandomSequences", kind),
        mock.patch.object(training_run, "RandomSequences", kind),
    ):
        yield


def trace(job: Config, bug: Bug | None) -> Trace | None:
    """Return the trace of a layout on rank 0, with a bug injected or none."""
    launch = Launch.from_environment(n_devices=0)
    torch.compiler.reset()  # what earlier layouts compiled counts towards a limit
    with bug(launch.rank) if bug else contextlib.nullcontext(), data_of(job):
        result = training_run.run_layout(job, launch, steps=STEPS)
    return result if launch.rank == 0 else None


class Runner:
    """Runs layouts, on pools that serve many of them. `bug` is injected into each."""

    def __init__(self, pools: RankPools | None = None, bug: Bug | None = None):
        self.pools, self.bug = pools or RankPools(TIMEOUT_SECONDS), bug
        self._folder = tempfile.TemporaryDirectory()
        write_texts(Path(self._folder.name) / "texts")

    def close(self) -> None:
        self.pools.close()
        self.close_folder()

    def close_folder(self) -> None:
        """Delete the texts and their token caches, and leave the pools to others."""
        self._folder.cleanup()

    def run(self, layout: Layout) -> Result:
        began = time.monotonic()
        try:
            result = self._run(in_folder(layout.config, Path(self._folder.name)))
        except RankError as error:
            result = raised(str(error))
        except (ConfigError, TrainingError) as error:
            result = Result(REJECTED, where=str(error).replace("\n", "; "))
        except Exception as error:  # of the reference
            result = Result(type(error).__name__, where=f"reference: {str(error).strip().splitlines()[-1]}")
        return dataclasses.replace(result, seconds=time.monotonic() - began)

    def _run(self, job: Config) -> Result:
        actual, *_ = Retrying(self.pools, job.parallelism.world_size).run(trace, job=job, bug=self.bug)
        with data_of(job):
            expected = reference.run_reference(job, CPU, steps=STEPS)
            allowed = tolerances(job, expected, CPU, steps=STEPS)
        if max(allowed.values()) > FLOAT64_TOLERANCE:
            # Where a gradient is no more than rounding, Adam's updates have either sign. The reference's own rounding
            # shows that in large models; those of a few elements may have one in the layout alone.
            weights = [name for name in allowed if name.startswith("final weight ")]
            allowed |= {name: max(allowed[name], 2 * STEPS * job.optimizer.lr) for name in weights}
        return compared(expected, actual, allowed)


def compared(expected: Trace, actual: Trace, tolerances: dict[str, float]) -> Result:
    """Return the first entry that differs by more than is allowed; if there is none, the one that is next to it."""
    found = differences(expected, actual)
    # Initial weights must agree bit for bit. An entry that only the layout has is in no tolerance.
    allowed = {name: 0.0 if name.startswith("initial weight") else tolerances.get(name, 0.0) for name in found}
    wrong = [name for name, difference in found.items() if difference > allowed[name]]
    name = wrong[0] if wrong else max(found, key=lambda name: found[name] / (allowed[name] or 1))
    return Result(DIFFERS if wrong else EQUAL, found[name], allowed[name], name)


def raised(message: str) -> Result:
    """Return what the first rank raised, of the tracebacks of all of them."""
    ranks = re.split(r"^rank \d+: ", message, flags=re.MULTILINE)[1:]
    lines = [rank.strip().splitlines()[-1] for rank in ranks]
    last = next((line for line in lines if not CONSEQUENCES.search(line)), lines[0])
    kind, _, text = last.partition(":")
    kind = kind.rpartition(".")[-1]
    if kind in (ConfigError.__name__, TrainingError.__name__):
        return Result(REJECTED, where=text.strip())
    return Result(kind if text else "RankError", where=(text or last).strip())


def in_folder(config: Config, folder: Path) -> Config:
    """Return a config whose dataset is in a folder, with its token cache."""
    training = config.training
    tables = [table.model_copy(update={"dataset_path": str(folder / "texts")}) for table in training.datasets]
    path = str(folder / training.dataset_path) if training.dataset_path else ""
    cache = str(folder / "cache")
    return config.replace(training__dataset_path=path, training__datasets=tables, training__cache_folder=cache)


def write_texts(folder: Path) -> None:
    """Write files with documents of many lengths, some paragraphs long and some of a few bytes."""
    folder.mkdir()
    for number in range(32):
        lines = [f"{number} {line} " + "word " * (7 * number * line % 23) for line in range(1, 2 + number % 9)]
        (folder / f"{number}.txt").write_text("\n\n".join(lines) + "\n")
