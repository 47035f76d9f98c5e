"""Search for the fastest layout with which a model fits a number of devices.

A closed-form estimate of memory drops layouts that do not fit, and the config's rules drop layouts that train.py would
reject. The remaining layouts are planned (titanlite/tools/plan) a few at a time: the heuristic baseline, FSDP alone,
then the layouts with the shortest steps by a closed-form estimate. The last round plans variations of the fastest
layouts. Every plan corrects the estimates of similar layouts. Only a layout that was planned is recommended."""

import dataclasses
import math
from collections.abc import Callable
from concurrent.futures import as_completed
from typing import NamedTuple

from titanlite.config.loader import ConfigError, LoadedConfig
from titanlite.launch.progress_bar import progress_bar
from titanlite.tools.advise.estimates import REPEATED, estimate_bytes, estimate_seconds
from titanlite.tools.advise.search_space import Candidate, Mesh, Task, candidates, heuristic_baseline, load_candidate
from titanlite.tools.plan.planner import make_plan, process_pool
from titanlite.tools.plan.report import time_shares
from titanlite.tools.plan.result import Spread

ROUNDS, PLANS_PER_ROUND = 3, 4  # at most ROUNDS * PLANS_PER_ROUND layouts are planned, on any number of cores
CLOSE = 1.03  # ratio of two step times below which plans cannot tell which layout is faster


class PlannedLayout(NamedTuple):
    """The plan of a candidate: bytes of the rank that needs most, seconds of a step, tokens per second per device, and
    the share of time lost to the pipeline bubble. All communication takes `communication` seconds, `overlapped` of them
    overlapped with computation. `shares` is the result of report.time_shares. `problem` says why planning failed."""

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
    """Plan a candidate; an error becomes the result's `problem`."""
    try:
        plan = make_plan(config, world_size=n_devices)
    except Exception as error:  # report a layout that cannot be planned, and compare the other layouts
        return PlannedLayout(candidate, problem=f"{type(error).__name__}: {error}")
    shares, seconds = time_shares(plan), plan.cost.seconds
    communication = sum(value for name, value in seconds.items() if name.startswith("communication: "))
    times = plan.step_seconds, plan.tokens_per_second, plan.mfu, plan.pipeline_bubble
    overlapped = max(communication - shares["exposed communication"], 0.0)
    return PlannedLayout(candidate, plan.worst.total, *times, communication, overlapped, shares, plan.spread)


class Search:
    """Chooses which candidates to plan."""

    def __init__(self, task: Task):
        self.task, self.baseline = task, heuristic_baseline(task)  # baseline: degrees of the heuristic baseline
        self.planned: list[PlannedLayout] = []  # candidates planned so far, including failed plans
        self.rejected: dict[Mesh, str] = {}  # reason why each mesh was first rejected
        self._open = set(candidates(task))
        self.interrupted = False  # whether Ctrl-C ended the search early

    def fits(self, size: float) -> bool:
        return size <= self.task.device.memory

    def fitting(self) -> list[PlannedLayout]:
        """Return the planned layouts that fit, fastest first; equally fast layouts are sorted by `_costs`."""
        fitting = [layout for layout in self.planned if not layout.problem and self.fits(layout.bytes)]
        return sorted(fitting, key=lambda layout: (round(layout.seconds, 3), _costs(layout.candidate)))

    def recommended(self) -> PlannedLayout:
        """Choose among the layouts with steps of at most CLOSE times the fastest: the widely used heuristic baseline,
        or else the layout with the least communication, since communication is often slower than planned."""
        fitting = self.fitting()
        close = [layout for layout in fitting if layout.seconds <= CLOSE * fitting[0].seconds]
        return min(close, key=lambda layout: (layout.candidate.mesh != self.baseline, layout.communication))

    def least_bytes(self) -> float:
        """Return the bytes of the candidate that needs the least memory, planned or not."""
        estimates = (estimate_bytes(self.task, candidate) for candidate in candidates(self.task))
        return min([*estimates, *(layout.bytes for layout in self.planned if not layout.problem)], default=math.inf)

    def remedy(self) -> str:
        """Return a line on how many devices would be enough by the estimate, and on options that need less memory."""
        options = (
            'optimizer.state_dtype = "bfloat16" or training.enable_cpu_offload = true in a config need less memory'
        )
        for n in (self.task.n_devices * 2**i for i in range(1, 5)):
            task = dataclasses.replace(self.task, n_devices=n, sequences=max(self.task.sequences // n, 1) * n)
            if any(self.fits(estimate_bytes(task, candidate)) for candidate in candidates(task)):
                return f"by the estimate, {n:,} devices would do; {options}"
        return f"by the estimate, {n:,} devices would not do either; {options}"

    def corrected(self, estimate: Callable[[Task, Candidate], float], figure: str) -> Callable[[Candidate], float]:
        """Return a function that estimates PlannedLayout's field `figure`, corrected by plans of similar candidates."""
        ratios: dict[tuple, list[float]] = {}
        for layout in self.planned:
            if not layout.problem:
                ratio = getattr(layout, figure) / estimate(self.task, layout.candidate)
                for key in _similarities(layout.candidate):
                    ratios.setdefault(key, []).append(ratio)

        def corrected(candidate: Candidate) -> float:
            known = next((ratios[key] for key in _similarities(candidate) if key in ratios), [1.0])
            return estimate(self.task, candidate) * sum(known) / len(known)

        return corrected

    def next_round(self, *, last: bool) -> list[tuple[Candidate, LoadedConfig]]:
        """Return the candidates to plan in the next round, with their configs. The last round varies mesh, schedule,
        checkpointing or precision of the fastest layouts; earlier rounds try new degrees."""
        fitting, order = self.fitting(), self.order()
        key_of, known = (_choices, self.planned) if last else (_split, fitting)
        done = {key_of(layout.candidate) for layout in known}
        chosen: list[tuple[Candidate, LoadedConfig]] = []
        for candidate in _variations(fitting, order) if last else order:
            if len(chosen) < PLANS_PER_ROUND and candidate in self._open and key_of(candidate) not in done:
                self._open.discard(candidate)  # a candidate that is rejected below is not proposed again
                try:
                    chosen.append((candidate, load_candidate(self.task, candidate)))
                    done.add(key_of(candidate))
                except ConfigError as error:
                    self.rejected.setdefault(candidate.mesh, error.problems[0])
        return chosen

    def order(self) -> list[Candidate]:
        """Return the candidates that are estimated to fit, in the order in which to plan them: the heuristic baseline
        and FSDP alone, then those with the shortest estimated steps."""
        size, seconds = self.corrected(estimate_bytes, "bytes"), self.corrected(estimate_seconds, "seconds")
        first = self.baseline, Mesh(1, 1, self.task.n_devices, 1, 1, 1)
        fitting = (candidate for candidate in self._open if self.fits(size(candidate)))
        return sorted(fitting, key=lambda one: (one.mesh not in first, not one.float8, seconds(one), _costs(one)))


def _similarities(candidate: Candidate) -> list[tuple]:
    """Return a candidate's keys, most specific first. Estimates of candidates with a common key have similar errors."""
    mesh, compiled, full = candidate.mesh, candidate.compiled, candidate.checkpointing == "full"
    return [(*candidate[:3], compiled, full), (mesh, compiled), (mesh.pp > 1, compiled), ()]


def _degrees(candidate: Candidate) -> tuple[int, int, int]:
    return candidate.mesh.pp, candidate.mesh.cp, candidate.mesh.tp


def _split(candidate: Candidate) -> tuple[int, ...]:
    """Return the degrees that all rounds except the last vary: pp, cp, tp and ep."""
    return *_degrees(candidate), candidate.mesh.ep


def _costs(candidate: Candidate) -> tuple[float, ...]:
    """Return numbers that are larger for layouts that tend to be slower: repeated work, pp, cp and tp degrees."""
    return REPEATED[candidate.checkpointing], *_degrees(candidate)


def _choices(candidate: Candidate) -> tuple:
    """Return the choices that the last round varies."""
    pipeline = candidate.schedule, candidate.stages
    return candidate.mesh, pipeline, candidate.checkpointing, candidate.float8


def _variations(fitting: list[PlannedLayout], order: list[Candidate]) -> list[Candidate]:
    """Return the candidates that differ in one choice from a layout that fits; variations of the fastest come first."""

    def varies(candidate: Candidate, layout: PlannedLayout) -> bool:
        pairs = zip(_choices(candidate), _choices(layout.candidate), strict=True)
        return _degrees(candidate) == _degrees(layout.candidate) and sum(one != other for one, other in pairs) == 1

    return [candidate for layout in fitting for candidate in order if varies(candidate, layout)]


def search(task: Task, *, show_progress: bool = False) -> Search:
    """Plan the most promising candidates. If one of them fits, Ctrl-C ends the search early with the plans made so far;
    otherwise KeyboardInterrupt is raised. show_progress prints progress to standard error."""
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
            futures = [pool.submit(plan_candidate, config, each, result.task.n_devices) for each, config in chosen]
            for future in as_completed(futures):
                result.planned.append(future.result())
                advance(1)
            advance(PLANS_PER_ROUND - len(chosen))
