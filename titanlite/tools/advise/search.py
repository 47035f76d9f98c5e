"""Search the layouts of a model on so many devices for the fastest one that fits.

A closed-form estimate of memory drops what does not fit, and the config's own rules drop what is not legal. The rest is
planned (titanlite/plan) in a fixed order, a few at a time: the heuristic baseline, FSDP alone, then what recomputes
least and splits the model least. The last round varies the fastest layouts. Every plan corrects the memory estimates of
the layouts that are like it. The recommended layout is one that was planned.
"""

import math
from collections.abc import Callable
from concurrent.futures import as_completed
from typing import NamedTuple

from titanlite.config.loader import ConfigError, LoadedConfig
from titanlite.launch.progress_bar import progress_bar
from titanlite.tools.advise.memory_bound import estimate_bytes
from titanlite.tools.advise.search_space import (
    CHECKPOINTING,
    SCHEDULES,
    Candidate,
    Mesh,
    Task,
    candidates,
    heuristic_baseline,
    load_candidate,
)
from titanlite.tools.plan.planner import make_plan, process_pool
from titanlite.tools.plan.report import time_shares
from titanlite.tools.plan.result import Spread

ROUNDS, PLANS_PER_ROUND = 3, 4
"""How many layouts are planned at most, whatever the number of cores."""
CLOSE = 1.03
"""How many times as long as the fastest a layout may take and still be recommended: plans are not more accurate."""


class PlannedLayout(NamedTuple):
    """The plan of a candidate: bytes of the worst rank, seconds of a step and tokens per second and device.
    `pipeline_bubble` is a share of the pipeline's time, `communication` is in seconds, and `overlapped` the part of it
    that overlaps with computation; `shares` is report.time_shares, `spread` is result.Spread; `problem` says why there
    is no plan, if so."""

    candidate: Candidate
    bytes: int = 0
    seconds: float = math.inf
    tokens_per_second: float = 0.0
    mfu: float = 0.0
    pipeline_bubble: float = 0.0
    communication: float = 0.0
    overlapped: float = 0.0
    shares: dict[str, float] = {}  # noqa: RUF012
    spread: Spread = {}  # noqa: RUF012
    problem: str = ""


def plan_candidate(config: LoadedConfig, candidate: Candidate, n_devices: int) -> PlannedLayout:
    """Plan a candidate."""
    try:
        plan = make_plan(config, world_size=n_devices)
    except Exception as error:  # a layout that cannot be planned is reported, and the others are still compared
        return PlannedLayout(candidate, problem=f"{type(error).__name__}: {error}")
    shares, seconds = time_shares(plan), plan.cost.seconds
    communication = sum(value for name, value in seconds.items() if name.startswith("communication: "))
    times = plan.step_seconds, plan.tokens_per_second, plan.mfu, plan.pipeline_bubble
    overlapped = max(communication - shares["exposed communication"], 0.0)
    return PlannedLayout(candidate, plan.worst.total, *times, communication, overlapped, shares, plan.spread)


class Search:
    """Chooses which candidates to plan.

    Attributes:
        planned: so far, with those that could not be planned.
        baseline: the degrees of the heuristic baseline.
        rejected: the first problem of a rejected candidate, by mesh.
        interrupted: whether the search was ended before it had planned all that it would have.
    """

    def __init__(self, task: Task):
        self.task, self.baseline = task, heuristic_baseline(task)
        self.planned: list[PlannedLayout] = []
        self.rejected: dict[Mesh, str] = {}
        self._open = set(candidates(task))
        self.interrupted = False

    def fits(self, size: float) -> bool:
        return size <= self.task.device.memory

    def fitting(self) -> list[PlannedLayout]:
        """Return the planned layouts that fit, the fastest first; of equally fast ones the simplest."""
        fitting = [layout for layout in self.planned if not layout.problem and self.fits(layout.bytes)]
        return sorted(fitting, key=lambda layout: (round(layout.seconds, 3), _costs(layout.candidate)))

    def recommended(self) -> PlannedLayout:
        """Return the heuristic baseline if it is as fast as the fastest, within the accuracy of a plan, since many have
        trained with it; else, of those that are as fast, the one with the least communication, which is slower than
        planned first. At least one layout must fit."""
        fitting = self.fitting()
        close = [layout for layout in fitting if layout.seconds <= CLOSE * fitting[0].seconds]
        return min(close, key=lambda layout: (layout.candidate.mesh != self.baseline, layout.communication))

    def least_bytes(self) -> float:
        """Return the bytes of the candidate that needs least, planned or not."""
        estimates = (estimate_bytes(self.task, candidate) for candidate in candidates(self.task))
        return min([*estimates, *(layout.bytes for layout in self.planned if not layout.problem)], default=math.inf)

    def corrected_bytes(self) -> Callable[[Candidate], float]:
        """Return a function: a candidate's estimated bytes, times the ratio of similar plans to their estimates."""
        ratios: dict[tuple, list[float]] = {}
        for layout in self.planned:
            if not layout.problem:
                ratio = layout.bytes / estimate_bytes(self.task, layout.candidate)
                for key in _similarities(layout.candidate):
                    ratios.setdefault(key, []).append(ratio)

        def corrected(candidate: Candidate) -> float:
            known = next((ratios[key] for key in _similarities(candidate) if key in ratios), [1.0])
            return estimate_bytes(self.task, candidate) * sum(known) / len(known)

        return corrected

    def next_round(self, *, last: bool) -> list[tuple[Candidate, LoadedConfig]]:
        """Return the candidates to plan now, with their configs. The last round varies the schedule, checkpointing,
        replication and the like of the fastest layouts; the others try new degrees."""
        corrected, fitting = self.corrected_bytes(), self.fitting()
        order = sorted(
            (candidate for candidate in self._open if self.fits(corrected(candidate))),
            key=lambda candidate: self._priority(candidate, fitting),
        )
        key_of, known = (_choices, self.planned) if last else (_split, fitting)
        done = {key_of(layout.candidate) for layout in known}
        chosen: list[tuple[Candidate, LoadedConfig]] = []
        for candidate in _variations(fitting, order) if last else order:
            if len(chosen) < PLANS_PER_ROUND and candidate in self._open and key_of(candidate) not in done:
                self._open.discard(candidate)  # also if it is rejected: it is not proposed again
                try:
                    chosen.append((candidate, load_candidate(self.task, candidate)))
                    done.add(key_of(candidate))
                except ConfigError as error:
                    self.rejected.setdefault(candidate.mesh, error.problems[0])
        return chosen

    def _priority(self, candidate: Candidate, fitting: list[PlannedLayout]) -> tuple:
        """Sort the heuristic baseline and FSDP alone first, and last what splits the model more than a layout that fits
        and recomputes no less. Between them is first what recomputes least, then what splits least: the sequence rather
        than tensors, and those rather than layers. Larger batches are first.

        Of models with experts what splits least comes before what recomputes least, and so do larger batches: FSDP
        gathers all weights for each of them, and a token uses few. Experts are rather partitioned over a node than
        gathered, and over several nodes last."""
        mesh, costs = candidate.mesh, _costs(candidate)
        first = mesh in (self.baseline, Mesh(1, 1, self.task.n_devices, 1, 1, 1))
        needless = any(
            all(cost <= other for cost, other in zip(_costs(layout.candidate), costs, strict=True))
            for layout in fitting
            if layout.candidate.mesh.ep == mesh.ep
        )
        degrees = math.prod(_degrees(candidate)), mesh.pp, mesh.tp, mesh.dp_replicate, mesh.ulysses
        batch = -candidate.local_batch, candidate.microbatch, SCHEDULES.index((candidate.schedule, candidate.stages))
        if self.task.model.moe.n_experts:
            across_nodes = mesh.ep > self.task.device.devices_per_node
            experts = mesh.ep if across_nodes else -mesh.ep
            return (not first, needless, across_nodes, *degrees, experts, *batch, costs[0])
        return (not first, needless, costs[0], *degrees, not candidate.float8, *batch)


def _similarities(candidate: Candidate) -> list[tuple]:
    """Return what a candidate has in common with others whose memory estimates are as wrong, the most similar first."""
    mesh, compiled, full = candidate.mesh, candidate.compiled, candidate.checkpointing == "full"
    return [(mesh, compiled, candidate.schedule, candidate.stages, full), (mesh, compiled), (mesh.pp > 1, compiled)]


def _degrees(candidate: Candidate) -> tuple[int, int, int]:
    return candidate.mesh.pp, candidate.mesh.cp, candidate.mesh.tp


def _split(candidate: Candidate) -> tuple[int, ...]:
    """Return what the first rounds vary: the degrees that split the model, and that of experts."""
    return *_degrees(candidate), candidate.mesh.ep


def _costs(candidate: Candidate) -> tuple[int, ...]:
    """Return what makes a layout slower as it grows: activation checkpointing, and the degrees that split the model."""
    return CHECKPOINTING.index(candidate.checkpointing), *_degrees(candidate)


def _choices(candidate: Candidate) -> tuple:
    """Return the choices that the last round varies."""
    pipeline = candidate.schedule, candidate.stages
    return candidate.mesh, pipeline, candidate.checkpointing, candidate.float8


def _variations(fitting: list[PlannedLayout], order: list[Candidate]) -> list[Candidate]:
    """Return the candidates that differ from a layout in one choice, those of the fastest first."""

    def varies(candidate: Candidate, layout: PlannedLayout) -> bool:
        pairs = zip(_choices(candidate), _choices(layout.candidate), strict=True)
        return _degrees(candidate) == _degrees(layout.candidate) and sum(one != other for one, other in pairs) == 1

    return [candidate for layout in fitting for candidate in order if varies(candidate, layout)]


def search(task: Task, *, show_progress: bool = False) -> Search:
    """Plan the most promising candidates, and print progress to standard error if asked to. Ctrl-C ends the search, and
    what has been planned is returned if a layout fits."""
    result = Search(task)
    try:
        _plan_rounds(result, show_progress=show_progress)
    except KeyboardInterrupt:
        if not result.fitting():
            raise
        result.interrupted = True
    return result


def _plan_rounds(result: Search, *, show_progress: bool) -> None:
    total = ROUNDS * PLANS_PER_ROUND
    with (
        process_pool(PLANS_PER_ROUND, preload="titanlite.tools.advise.search") as pool,
        progress_bar("layout search", total=total, unit="plans", enabled=show_progress) as advance,
    ):
        for number in range(1, ROUNDS + 1):
            chosen = result.next_round(last=number == ROUNDS)
            futures = [
                pool.submit(plan_candidate, config, candidate, result.task.n_devices) for candidate, config in chosen
            ]
            for future in as_completed(futures):
                result.planned.append(future.result())
                advance(1)
            advance(PLANS_PER_ROUND - len(chosen))
