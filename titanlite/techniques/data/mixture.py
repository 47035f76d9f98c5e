"""Mixtures: packed sequences of several datasets in one endless order with exact shares, for any number of ranks. After
each block of MIXTURE_BLOCK sequences, a dataset's number of sequences is its share of all sequences so far, rounded to
an integer. Sequences are shuffled within a block, so that no data-parallel rank always reads the same dataset."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import xxhash

from titanlite.config.loader import ConfigError
from titanlite.config.schema import MixedDataset
from titanlite.data.packing import PackedSequences, Sequence, ValidationSequences
from titanlite.data.shuffle import permuted
from titanlite.files.durable import Int63, Record, parse_part

MIXTURE_BLOCK = 1024
"""Number of sequences in a block. Another number would change the order of every mixture."""
WEIGHT_OF_LARGEST = 2**32  # integer share of the dataset with the largest weight


def seed_of(name: str, seed: int) -> int:
    """Return the seed for the order of a dataset's sequences, which does not depend on other datasets."""
    return xxhash.xxh3_64_intdigest(f"{seed}/{name}".encode())


def integer_shares(options: list[MixedDataset], sizes: list[int]) -> list[int]:
    """Return the shares of datasets as integers, in proportion to their weights or token budgets. Datasets without a
    weight or budget have shares in proportion to their numbers of sequences, `sizes`."""
    if options[0].weight != -1:
        largest = max(each.weight for each in options)
        return [max(round(each.weight / largest * WEIGHT_OF_LARGEST), 1) for each in options]
    return [each.tokens if each.tokens != -1 else size for each, size in zip(options, sizes, strict=True)]


def largest_count(options: MixedDataset, n_sequences: int, seq_len: int) -> int | None:
    """Return a dataset's limit in sequences, from its epochs (rounded down) and tokens (rounded up); None: no limit."""
    limits = []
    if options.epochs != -1:
        limits.append(int(Fraction(repr(options.epochs)) * n_sequences))  # repr makes 0.29 exactly 29/100
    if options.tokens != -1:
        limits.append(-(-options.tokens // seq_len))
    return min(limits, default=None)


class Component(NamedTuple):
    """One dataset of a mixture, with its order of packed sequences."""

    name: str
    sequences: PackedSequences
    content: str  # text that identifies the dataset's tokens
    share: int  # share of the mixture, relative to the shares of the other datasets
    limit: int | None
    """How many sequences of the dataset may be read; None: any number."""

    def __str__(self) -> str:
        limit = "" if self.limit is None else f", at most {self.limit} sequences"
        return f"{self.name} ({self.content}, share {self.share}{limit})"


class MixtureBlock(NamedTuple):
    """One block of a mixture. `counts`: number of each dataset's sequences before the block, over all epochs."""

    first: int  # global index of the block's first sequence
    counts: tuple[int, ...]
    phase: tuple[int, ...]
    """Counts at the start of this phase. The first phase begins with the mixture, others when a dataset is used up."""


class _Mixture(Record):
    """A saved MixtureBlock, with counts by dataset name. `read` includes datasets that are no longer in the mixture."""

    identity: str
    first: Int63
    counts: dict[str, Int63]
    phase: dict[str, Int63]
    read: dict[str, Int63]


class MixedSequences:
    """The training split of a mixture as an endless order of packed sequences, the same for any number of ranks.
    `start`: where a run resumes. If all datasets are used up (`check` rejects this), reading exceeds their limits."""

    def __init__(self, components: list[Component], *, seed: int, start: MixtureBlock | None = None):
        self.components, self.seed = components, seed
        zeros, self.n_sequences = (0,) * len(components), sum(each.sequences.n_sequences for each in components)
        self.start = start or MixtureBlock(0, zeros, zeros)
        self.others: dict[str, int] = {}
        """Counts of datasets that only an earlier mixture has."""
        self._recent = self.start
        self._walk = functools.lru_cache(maxsize=8)(self._walk_through)

    def __str__(self) -> str:
        total = sum(each.share for each in self.components)
        return ", ".join(f"{each.name} {each.share / total:.1%} of {each.sequences}" for each in self.components)

    @property
    def identity(self) -> str:
        """Return a text that is equal for two mixtures only if they have the same sequences at every global index."""
        return "; ".join(map(str, self.components))

    def read(self, first: int, stride: int) -> Iterator[tuple[Sequence, None]]:
        """Yield the sequences with global index first, first + stride, ..., as PackedSequences.read does."""
        block = self.start
        while True:
            block = self._block_of(first, block)
            dataset, index = self._walk(block)[0][first - block.first]
            yield self.components[dataset].sequences[index], None
            first += stride

    @property
    def names(self) -> list[str]:
        return [each.name for each in self.components]

    def datasets_of(self, positions: Iterable[int]) -> list[int]:
        """Return the index of the dataset that the sequence at each global index is from. `positions` must ascend."""
        blocks = ((position, self._block_near(position)) for position in positions)
        return [self._walk(block)[0][position - block.first][0] for position, block in blocks]

    # State -----------------------------------------------------------------------------------------------------------

    def _block_near(self, position: int) -> MixtureBlock:
        """Return the block that contains a position; fast if positions ascend."""
        self._recent = self._block_of(position, self._recent if position >= self._recent.first else self.start)
        return self._recent

    def counts(self, position: int) -> list[int]:
        """Return how many sequences of each dataset come before a position, over all epochs."""
        block = self._block_near(position)
        read = Counter(dataset for dataset, _ in self._walk(block)[0][: position - block.first])
        return [count + read[dataset] for dataset, count in enumerate(block.counts)]

    def state(self, position: int) -> dict[str, Any]:
        """Return the state that `resumed` needs, as plain JSON, the same on every rank."""
        read, block = self._by_name(self.counts(position)), self._recent
        counts, phase = self._by_name(block.counts), self._by_name(block.phase)
        state = {"identity": self.identity, "first": block.first, "counts": counts, "phase": phase}
        return {"mixture": {**state, "read": {**self.others, **read}}}

    def _by_name(self, counts: list[int] | tuple[int, ...]) -> dict[str, int]:
        return dict(zip(self.names, counts, strict=True))

    def resumed(self, loader_state: dict[str, Any] | None) -> MixedSequences:
        """Return this mixture from where a run stopped, as `loader_state` tells; None: from the beginning. If that run
        had another mixture, each dataset continues from the count under its name, and a new block begins."""
        if not loader_state:
            return self
        position = parse_part(loader_state, "data.next_sequence", Int63)
        state = parse_part(loader_state, "data.mixture", _Mixture | None)
        if not state or not _is_possible(state, position):
            raise ConfigError([f"checkpoint: the mixture cannot be at position {position}: state.json was changed"])
        names, read = self.names, state.read
        if state.identity == self.identity:
            counts, phase = (tuple(each[name] for name in names) for each in (state.counts, state.phase))
            start = MixtureBlock(state.first, counts, phase)
        else:
            counts = tuple(read.get(name, 0) for name in names)
            start = MixtureBlock(position, counts, counts)
        resumed = MixedSequences(self.components, seed=self.seed, start=start)
        resumed.others = {name: count for name, count in read.items() if name not in names}
        return resumed

    def check(self, loader_state: dict[str, Any] | None, n: int) -> None:
        """Raise ConfigError if the datasets' limits allow fewer than n sequences after the loader state's position."""
        resumed = self.resumed(loader_state)
        counts, left = resumed.counts(loader_state["next_sequence"] if loader_state else 0), []
        for each, count in zip(self.components, counts, strict=True):
            if each.limit is None:
                return
            left.append(max(each.limit - count, 0))
        if sum(left) < n:
            names = ", ".join(f"{each.name} {number:,}" for each, number in zip(self.components, left, strict=True))
            problem = f"training.datasets: training.steps needs {n:,} packed sequences, and the datasets' epochs or "
            problem += f"tokens allow {sum(left):,} ({names}); set fewer steps, or higher limits"
            raise ConfigError([problem])

    def metrics(self, position: int) -> dict[str, float]:
        """Return the number of tokens and of epochs of each dataset before a position, by metric tag."""
        values: dict[str, float] = {}
        for each, count in zip(self.components, self.counts(position), strict=True):
            values[f"data/{each.name}/tokens"] = count * each.sequences.seq_len
            values[f"data/{each.name}/epoch"] = count / each.sequences.n_sequences
        return values

    def expected_counts(self, n: int) -> list[float]:
        """Return about how many of the first n sequences come from each dataset; the datasets' limits must allow n."""
        counts, left = [0.0] * len(self.components), float(n)
        while left and (active := {i: self.components[i] for i in self._active(counts)}):
            total = sum(each.share for each in active.values())
            ends = {}  # number of sequences of the mixture until a dataset reaches its limit, by dataset
            for i, each in active.items():
                ends[i] = math.inf if each.limit is None else (each.limit - counts[i]) * total / each.share
            taken = min(left, *ends.values())
            for i, each in active.items():
                is_used_up = each.limit and ends[i] <= taken
                counts[i] = float(each.limit) if is_used_up else counts[i] + taken * each.share / total
            left -= taken
        return counts

    # Order -----------------------------------------------------------------------------------------------------------

    def _active(self, counts: Iterable[float]) -> list[int]:
        pairs = zip(self.components, counts, strict=True)
        return [i for i, (each, count) in enumerate(pairs) if each.limit is None or count < each.limit]

    def _block_of(self, position: int, block: MixtureBlock) -> MixtureBlock:
        """Return the block that contains a position, found by walking from `block`, which must not be later."""
        while position >= block.first + MIXTURE_BLOCK:
            block = self._walk(block)[1]
        return block

    def _walk_through(self, block: MixtureBlock) -> tuple[list[tuple[int, int]], MixtureBlock]:
        """Return (dataset, index in the dataset's order) for each sequence of a block, and the next block."""
        chosen, counts, phase = [], list(block.counts), block.phase
        end = MIXTURE_BLOCK  # number of sequences to shuffle: fewer only if all datasets are used up in this block
        while len(chosen) < MIXTURE_BLOCK:
            chosen += self._choose(counts, phase, MIXTURE_BLOCK - len(chosen))
            if counts[chosen[-1]] == self.components[chosen[-1]].limit:  # the chosen dataset is used up
                phase = tuple(counts)
                end = end if self._active(counts) else len(chosen)
        after = MixtureBlock(block.first + MIXTURE_BLOCK, tuple(counts), phase)
        order, counts = [], list(block.counts)
        for number in range(MIXTURE_BLOCK):
            shuffled = permuted(number, end, self.seed, block.first) if number < end else number
            dataset = chosen[shuffled]
            order.append((dataset, counts[dataset]))
            counts[dataset] += 1
        return order, after

    def _choose(self, counts: list[int], phase: tuple[int, ...], n: int) -> list[int]:
        """Return the datasets of the next n sequences (fewer if a dataset is used up), and add them to `counts`. Let W
        be the sum of the shares. A dataset with share w has m w / W of a phase's first m sequences, rounded up or down,
        if the index in the phase of its sequence k (from 0) is between floor(k W / w) and its deadline,
        ceil((k + 1) W / w) - 1. "Earliest deadline first" meets all deadlines, because the shares add up to W."""
        active = self._active(counts) or range(len(counts))
        shares = {i: self.components[i].share for i in active}
        total = sum(shares.values())
        m = sum(counts[i] - phase[i] for i in active)
        earliest = {i: (counts[i] - phase[i]) * total // shares[i] for i in active}
        latest = {i: -(-(counts[i] - phase[i] + 1) * total // shares[i]) for i in active}
        chosen = []
        while len(chosen) < n:
            i = min((i for i in active if earliest[i] <= m), key=latest.__getitem__)
            chosen.append(i)
            counts[i] += 1
            m += 1
            earliest[i] = (counts[i] - phase[i]) * total // shares[i]
            latest[i] = -(-(counts[i] - phase[i] + 1) * total // shares[i])
            if counts[i] == self.components[i].limit:
                break
        return chosen


def _is_possible(state: _Mixture, position: int) -> bool:
    counts, phase, read = state.counts, state.phase, state.read
    return (
        0 <= position - state.first <= MIXTURE_BLOCK
        and counts.keys() == phase.keys()
        and counts.keys() <= read.keys()
        and all(phase[name] <= count <= read[name] for name, count in counts.items())
        and sum(read.values()) <= position
    )


class MixedValidation:
    """The validation splits of a mixture's datasets, each read once. Sequences are interleaved evenly: among the first
    n sequences, the number from each dataset is in proportion to the size of its split."""

    def __init__(self, splits: list[ValidationSequences]):
        self.splits = splits
        self.n_sequences = sum(each.n_sequences for each in splits)
        places = [(np.arange(each.n_sequences) + 0.5) / each.n_sequences for each in splits]
        self._order = np.argsort(np.concatenate(places), kind="stable")
        self._ends = np.cumsum([each.n_sequences for each in splits])

    def __str__(self) -> str:
        return f"{self.n_sequences:,} packed sequences of {len(self.splits)} datasets"

    def __getitem__(self, index: int) -> Sequence:
        if index >= self.n_sequences:
            return self.splits[0][self.splits[0].n_sequences]
        number = int(self._order[index])
        split = int(np.searchsorted(self._ends, number, side="right"))
        return self.splits[split][number - int(self._ends[split]) + self.splits[split].n_sequences]
