"""Search the layouts of a model on so many devices for the fastest one that fits.

A closed-form estimate of memory drops what does not fit, and the config's own rules drop what is not legal. The rest is
planned in a fixed order (titanlite/plan), a few at a time: the heuristic baseline, FSDP alone, then the layouts that
split the model least. The last round varies the best layouts. Every plan corrects the memory estimates of the layouts
that are like it. The recommended layout is one that was planned.
"""

import math
from collections.abc import Callable, Iterator
from concurrent.futures import as_completed
from typing import NamedTuple

from titanlite.advise.memory_bound import estimate_bytes
from titanlite.advise.search_space import (
    CHECKPOINTING,
    SCHEDULES,
    Candidate,
    Mesh,
    Task,
    candidates,
    heuristic_baseline,
    load_candidate,
)
from titanlite.config.loader import ConfigError, LoadedConfig
from titanlite.plan.planner import make_plan, process_pool
from titanlite.plan.progress_bar import progress_bar
from titanlite.plan.report import time_shares

ROUNDS, PLANS_PER_ROUND = 3, 4
"""How many layouts are planned at most, whatever the number of cores."""
CLOSE = 1.03
"""How many times as long as the fastest a layout may take and still be recommended: plans are not more accurate."""


class PlannedLayout(NamedTuple):
    """What the plan says of a candidate.

    Attributes:
        bytes: of the worst rank.
        seconds: of a step.
        tokens_per_second: per device.
        pipeline_bubble: share of the pipeline's time.
        communication: seconds of all communication.
        overlapped: the part of it that overlaps with computation.
        shares: seconds of the step by what they are spent on (report.time_shares).
        problem: why there is no plan; empty if there is one.
    """

    candidate: Candidate
    bytes: int = 0
    seconds: float = math.inf
    tokens_per_second: float = 0.0
    mfu: float = 0.0
    pipeline_bubble: float = 0.0
    communication: float = 0.0
    overlapped: float = 0.0
    shares: dict[str, float] | None = None
    problem: str = ""


def plan_candidate(config: LoadedConfig, candidate: Candidate, n_devices: int) -> PlannedLayout:
    """Plan a candidate."""
    try:
        plan = make_plan(config, world_size=n_devices)
    except Exception as error:  # a layout that cannot be planned is reported, and the others are still compared
        return PlannedLayout(candidate, problem=f"{type(error).__name__}: {error}")
    communication, exposed = plan.cost.communication_seconds
    return PlannedLayout(
        candidate,
        bytes=plan.worst.total,
        seconds=plan.step_seconds,
        tokens_per_second=plan.tokens_per_second,
        mfu=plan.mfu,
        pipeline_bubble=plan.pipeline_bubble,
        communication=communication,
        overlapped=communication - exposed,
        shares=time_shares(plan),
    )


class Search:
    """Chooses which candidates to plan.

    Attributes:
        planned: so far.
        baseline: the degrees of the heuristic baseline.
        rejected: the first problem of a rejected candidate, by mesh.
    """

    def __init__(self, task: Task):
        self.task, self.baseline = task, heuristic_baseline(task)
        self.planned: list[PlannedLayout] = []
        self.rejected: dict[Mesh, str] = {}
        self._open = {candidate: estimate_bytes(task, candidate) for candidate in candidates(task)}

    def fits(self, size: float) -> bool:
        """Return whether a device has room for so many bytes."""
        return size <= self.task.device.memory

    def fitting(self) -> list[PlannedLayout]:
        """Return the planned layouts that fit, the fastest first. Of those that are equally fast, those come first that
        recompute least and that split least."""
        fitting = [layout for layout in self.planned if not layout.problem and self.fits(layout.bytes)]
        return sorted(fitting, key=lambda layout: (round(layout.seconds, 3), *_simplicity(layout.candidate)))

    def recommended(self) -> PlannedLayout:
        """Return the heuristic baseline if it is as fast as the fastest, within the accuracy of a plan, since many have
        trained with it; else, of those that are as fast, the one with the least communication, which is slower than
        planned first. At least one layout must fit."""
        fitting = self.fitting()
        close = [layout for layout in fitting if layout.seconds <= CLOSE * fitting[0].seconds]
        return min(close, key=lambda layout: (layout.candidate.mesh != self.baseline, layout.communication))

    def least_bytes(self) -> float:
        """Return the bytes of the candidate that needs least, planned or not."""
        planned = [layout.bytes for layout in self.planned if not layout.problem]
        return min([*self._open.values(), *planned], default=math.inf)

    def corrected_bytes(self) -> Callable[[Candidate], float]:
        """Return a function from a candidate to its estimated bytes, multiplied by what the plans of the most similar
        layouts were of their estimates."""
        ratios: dict[tuple, list[float]] = {}
        for layout in self.planned:
            if not layout.problem:
                ratio = layout.bytes / estimate_bytes(self.task, layout.candidate)
                for key in _similarities(layout.candidate):
                    ratios.setdefault(key, []).append(ratio)

        def corrected(candidate: Candidate) -> float:
            estimate = self._open.get(candidate) or estimate_bytes(self.task, candidate)
            known = next((ratios[key] for key in _similarities(candidate) if key in ratios), [1.0])
            return estimate * sum(known) / len(known)

        return corrected

    def next_round(self, *, last: bool) -> list[tuple[Candidate, LoadedConfig]]:
        """Return the candidates to plan now, with their configs.

        Args:
            last: whether this is the last round, which varies the best layouts; the others try new degrees.
        """
        corrected = self.corrected_bytes()
        order = sorted((one for one in self._open if self.fits(corrected(one))), key=self._priority)
        proposals = self._variations(order) if last else order
        tried = {layout.candidate.mesh.model_parallel for layout in self.fitting()} if not last else set()
        chosen: dict[object, tuple[Candidate, LoadedConfig]] = {}
        for candidate in proposals:
            key = _choices(candidate) if last else candidate.mesh.model_parallel
            if len(chosen) == PLANS_PER_ROUND:
                break
            if key not in chosen and key not in tried and candidate in self._open:
                config = self._load(candidate)
                if config is not None:
                    chosen[key] = candidate, config
        return list(chosen.values())

    def _priority(self, candidate: Candidate) -> tuple:
        """Sort the heuristic baseline and FSDP alone first, then what splits the model least. Of one mesh, what
        recomputes least is first, and then the largest batch."""
        mesh = candidate.mesh
        first = mesh in (self.baseline, Mesh(1, 1, self.task.n_devices, 1, 1, 1))
        degrees = math.prod(mesh.model_parallel), mesh.pp, mesh.tp, mesh.dp_replicate, mesh.ulysses
        checkpointing = CHECKPOINTING.index(candidate.checkpointing)
        batch = -candidate.local_batch, candidate.microbatch, SCHEDULES.index((candidate.schedule, candidate.stages))
        return (not first, *degrees, checkpointing, not candidate.float8, *batch)

    def _variations(self, order: list[Candidate]) -> Iterator[Candidate]:
        """Yield the candidates that differ from a planned layout in one choice, those of the fastest layout first."""
        planned = {_choices(layout.candidate) for layout in self.planned}
        for layout in self.fitting():
            choices = _choices(layout.candidate)
            for candidate in order:
                if candidate.mesh.model_parallel == layout.candidate.mesh.model_parallel:
                    others = _choices(candidate)
                    changes = sum(one != other for one, other in zip(choices, others, strict=True))
                    # The plan of a compiled block is the same with selective checkpointing as with none.
                    same = candidate.compiled and candidate.checkpointing == "selective"
                    if changes == 1 and others not in planned and not same:
                        yield candidate

    def _load(self, candidate: Candidate) -> LoadedConfig | None:
        """Return a candidate's config, or None if it is rejected. It is no longer open then."""
        del self._open[candidate]
        try:
            return load_candidate(self.task, candidate)
        except ConfigError as error:
            self.rejected.setdefault(candidate.mesh, error.problems[0])
            if "compile.enable" in str(error):  # some layouts cannot be compiled
                eager = candidate._replace(compiled=False)
                self._open[eager] = estimate_bytes(self.task, eager)
        return None


def _similarities(candidate: Candidate) -> list[tuple]:
    """Return what a candidate has in common with others whose memory estimates are as wrong, the most similar first."""
    mesh, compiled, pipeline = candidate.mesh, candidate.compiled, (candidate.schedule, candidate.stages)
    return [
        (mesh, compiled, pipeline, candidate.checkpointing == "full"),
        (mesh, compiled, pipeline),
        (mesh, compiled),
        (mesh.pp > 1, compiled),
    ]


def _choices(candidate: Candidate) -> tuple:
    """Return the choices that the last round varies, besides the batch."""
    pipeline = candidate.schedule, candidate.stages
    return candidate.mesh, pipeline, candidate.checkpointing, candidate.float8, candidate.compiled


def _simplicity(candidate: Candidate) -> tuple[int, int]:
    """Sort what recomputes less first, and then what is split over fewer axes."""
    return CHECKPOINTING.index(candidate.checkpointing), candidate.mesh.n_axes


def search(task: Task, *, show_progress: bool = False) -> Search:
    """Plan the most promising candidates.

    Args:
        show_progress: print progress to standard error.
    """
    result, total = Search(task), ROUNDS * PLANS_PER_ROUND
    with (
        process_pool(PLANS_PER_ROUND, preload="titanlite.advise.search") as pool,
        progress_bar("layout search", total=total, unit="plans", enabled=show_progress) as advance,
    ):
        for number in range(1, ROUNDS + 1):
            chosen = result.next_round(last=number == ROUNDS)
            futures = [pool.submit(plan_candidate, config, candidate, task.n_devices) for candidate, config in chosen]
            for future in as_completed(futures):
                result.planned.append(future.result())
                advance(1)
            advance(PLANS_PER_ROUND - len(chosen))
    return result
