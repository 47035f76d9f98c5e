"""Model the effect of torch.compile on a block's operators, without compiling. In the model of inductor, all pointwise
operators between two matrix multiplications, attentions or collectives become one kernel. A result that no other kernel
reads is never written. A result that the backward can compute again at little cost is not saved."""

from collections.abc import Collection, Mapping, Sequence

from titanlite.tools.plan.op_trace import Allocation, Communication, Dispatch, Event, HostWait, Memory, Segment, Work

UNFUSED = ("fsdp.", "c10d.", "aten._foreach", "aten._fused", "aten.embedding", "aten.split_with_sizes")
"""Name prefixes of operators that are never fused with others."""


def is_fusible(work: Work) -> bool:
    """Return whether an operator is pointwise, so that it can be part of a fused kernel."""
    return not work.flops and not work.name.startswith(UNFUSED)


def fuse(segments: Sequence[list[Event]]) -> list[list[Event]]:
    """Return segments' events with neighbouring pointwise operators of each segment fused. A kernel replaces the first
    operator of its group, with all bytes that the group reads and writes. The group's other operators are removed; so
    are allocations that only the group reads and its segment frees. The host dispatches only kernels."""
    groups = [group for segment in segments for group in _groups(segment)]
    readers: dict[Allocation, set[int]] = {}
    writer: dict[Allocation, int] = {}
    for number, group in enumerate(groups):
        for work in group:
            for allocation in work.inputs:
                readers.setdefault(allocation, set()).add(number)
            for allocation in work.outputs:
                writer.setdefault(allocation, number)
    freed = set().union(*map(_freed_where_allocated, segments))
    internal = {
        allocation
        for allocation, number in writer.items()
        if is_fusible(groups[number][0])
        and allocation.kind in ("temporary", "logits")
        and readers.get(allocation) == {number}  # a result without readers goes to a collective
        and allocation in freed
        and allocation.shape != ()
    }
    kernels: dict[int, Work] = {}  # keys: ids of the groups' first operators
    for number, group in enumerate(groups):
        own = {allocation for work in group for allocation in work.outputs if writer[allocation] == number}
        kernels[id(group[0])] = _kernel(group, own, internal) if is_fusible(group[0]) else group[0]
    return [_with_kernels(segment, kernels, internal) for segment in segments]


def _groups(segment: list[Event]) -> list[list[Work]]:
    """Return the operators of a segment, grouped by the kernel that computes them."""
    groups: list[list[Work]] = [[]]
    for event in segment:
        if isinstance(event, Work) and is_fusible(event):
            groups[-1].append(event)
        elif isinstance(event, (Work, Communication, HostWait)):
            groups += [[event], []] if isinstance(event, Work) else [[]]
    return [group for group in groups if group]


def _freed_where_allocated(segment: list[Event]) -> set[Allocation]:
    memory = [event for event in segment if isinstance(event, Memory)]
    allocated, freed = ({event.allocation for event in memory if (event.change < 0) == ends} for ends in (False, True))
    return allocated & freed


def _with_kernels(segment: list[Event], kernels: dict[int, Work], internal: set[Allocation]) -> list[Event]:
    """Return the events of a segment, with each kernel in place of the first operator that it computes."""
    fused: list[Event] = []
    for event in segment:
        own = kernels.get(id(event)) if isinstance(event, Work) else event
        if isinstance(own, (Work, Communication)):
            fused += [Dispatch(own.kernels, 0), own]
        elif isinstance(own, HostWait) or (isinstance(own, Memory) and own.allocation not in internal):
            fused.append(own)
    return fused


def _kernel(group: list[Work], own: set[Allocation], internal: set[Allocation]) -> Work:
    """Return a group of operators as one kernel, which neither reads its own results nor writes internal ones."""
    read, written = {}, {}
    for work in group:
        for allocation in set(work.inputs) - own:
            read[allocation] = max(read.get(allocation, 0), min(work.read, allocation.largest))
        for allocation in set(work.outputs) - internal:
            written[allocation] = max(written.get(allocation, 0), min(work.written, allocation.largest))
    sizes = {"read": sum(read.values()), "written": sum(written.values())}
    return group[0]._replace(inputs=tuple(read), outputs=tuple(written), **sizes)


def overlap(segments: Sequence[Segment], groups: Mapping[str, int]) -> None:
    """Mark, in place, the collectives that async TP overlaps in compiled blocks, and the overlapped products (torch
    2.13: torch._inductor.fx_passes.micro_pipeline_tp). `groups`: number of ranks of each tensor-parallel group."""
    for events in (segment.events for segment in segments if segment.mark[0] in ("layer F", "layer B")):
        works, split = [event for event in events if isinstance(event, Work)], dict[int, Work]()
        for index, event in enumerate(events):
            if isinstance(event, Communication) and (n := groups.get(event.group, 1)) > 1:
                found = {id(work): work._replace(kernels=n) for work in _overlapping(event, works)}
                # Async TP splits the collective into n chunks, each with a copy and two barriers: 3 * n kernels.
                events[index] = event._replace(products=tuple(found.values()), kernels=3 * n if found else 1)
                split |= found
        events[:] = [split.get(id(event), event) for event in events]


def _overlapping(event: Communication, works: list[Work]) -> list[Work]:
    """Return the products that async TP overlaps with a collective: products of an all-gathered tensor and a weight, or
    the product whose result only a reduce-scatter reads. Products with a bias, a float8 cast or a sum are excluded."""
    if event.name == "all_gather":
        gathered = [work for work in works if work.name == "aten.mm" and work.inputs[0] in event.outputs]
        return [work for work in gathered if work.inputs[1].kind in ("parameters", "gathered")]
    users = [work for work in works if not {*work.inputs, *work.outputs}.isdisjoint(event.inputs)]
    is_product = [work.name for work in users] in (["aten.mm"], ["aten._scaled_mm"])
    return users if event.name == "reduce_scatter" and is_product else []


class _Life:
    """The history of an allocation: the number of the segment that allocates it (`born`), the number of the segment
    that frees it (-1: none), how often its size changes, the operators of segment `born` that use it and that write it,
    and (segment, operator) of later uses."""

    def __init__(self, born: int):
        self.born, self.freed, self.changes = born, -1, 0
        self.uses: list[Work] = []
        self.writers: list[Work] = []
        self.later: list[tuple[int, Work]] = []


class _Saved:
    """The allocations that the forward saves for the backward."""

    def __init__(self, segments: Sequence[Segment]):
        self.segments, self.lives = segments, _lives(segments)
        self.freed: set[Allocation] = set()  # allocations that the forward frees instead of saving
        self.sources: dict[Allocation, set[Allocation]] = {}  # inputs from which the backward computes each of `freed`

    def exists(self, allocation: Allocation, number: int) -> bool:
        """Return whether an allocation exists in segment `number`."""
        life = self.lives.get(allocation)
        return life is None or (allocation not in self.freed and (life.freed == -1 or life.freed >= number))

    def computed_from(self, allocation: Allocation, number: int) -> set[Allocation] | None:
        """Return the saved allocations from which segment `number` can compute a pointwise result; None: it cannot."""
        life, found = self.lives[allocation], set()
        if not life.writers or not all(map(is_fusible, life.writers)):
            return None
        for source in {source for work in life.writers for source in work.inputs} - {allocation}:
            if self.exists(source, number):
                found.add(source)
                continue
            if self.lives[source].born != life.born:
                return None
            deeper = self.computed_from(source, number)
            found |= {source} if deeper is None else deeper
        return found

    def compute_again(self, allocation: Allocation) -> None:
        """Free an allocation in the forward if the backward can compute it from others that are saved or smaller."""
        life = self.lives[allocation]
        number = life.later[0][0]
        found = self.computed_from(allocation, number)
        instead = {source for source in found or () if not self.exists(source, number)}
        if found is None or sum(source.largest for source in instead) >= allocation.largest:
            return
        late = self.segments[life.freed].events
        for source in instead:  # save each source until the backward recomputes the allocation from it
            end = _take_end(self.segments, source, self.lives[source])
            late.insert(_end_of(allocation, late), end)
            self.lives[source].freed, source.kind = life.freed, allocation.kind
            self.freed.discard(source)
            self.sources.pop(source, None)
        self.freed.add(allocation)
        self.sources[allocation] = found


def save_less(segments: Sequence[Segment], forward: Collection[int], backward: Collection[int]) -> None:
    """Free in the forward the results that eager autograd saves and a compiled block does not
    (torch._functorch.partitioners.min_cut_rematerialization_partition): results that the backward does not read, and
    pointwise results that only pointwise operators of the backward read. The inputs of such a pointwise result exist in
    the backward anyway, or are smaller and are saved instead, such as bfloat16 logits instead of their float32
    log-softmax. `forward`, `backward`: indices of the compiled segments."""
    saved = _Saved(segments)
    for allocation, life in saved.lives.items():
        if life.born not in forward or life.freed <= life.born or life.changes != 2:
            continue
        if not life.later:
            if life.uses and not any(map(is_fusible, life.writers)):
                saved.freed.add(allocation)
        elif all(number in backward and is_fusible(work) for number, work in life.later):
            saved.compute_again(allocation)
    for allocation in saved.freed:  # free an allocation after its last use in the segment that allocates it
        allocation.kind, life = "temporary", saved.lives[allocation]
        end = _take_end(segments, allocation, life)
        early = segments[life.born].events
        early.insert(next(index for index, event in enumerate(early) if event is life.uses[-1]) + 1, end)
    for events in (segments[number].events for number in backward):
        for index, event in enumerate(events):
            if isinstance(event, Work) and not saved.sources.keys().isdisjoint(event.inputs):
                read = {source for x in event.inputs for source in saved.sources.get(x, (x,))}
                events[index] = event._replace(inputs=tuple(read))


def _lives(segments: Sequence[Segment]) -> dict[Allocation, _Life]:
    lives: dict[Allocation, _Life] = {}
    for number, segment in enumerate(segments):
        for event in segment.events:
            if isinstance(event, Memory):
                life = lives.setdefault(event.allocation, _Life(number))
                life.changes += 1
                life.freed = -1 if event.change > 0 else number
            elif isinstance(event, Work):
                for allocation in {*event.inputs, *event.outputs} & lives.keys():
                    life = lives[allocation]
                    if number > life.born:
                        life.later.append((number, event))
                    else:
                        life.uses.append(event)
                        life.writers += [event] if allocation in event.outputs else []
    return lives


def _take_end(segments: Sequence[Segment], allocation: Allocation, life: _Life) -> Event:
    events = segments[life.freed].events
    return events.pop(_end_of(allocation, events))


def _end_of(allocation: Allocation, events: list[Event]) -> int:
    """Return the index of the event that frees an allocation."""
    ends = (isinstance(each, Memory) and each.allocation is allocation and each.change < 0 for each in events)
    return list(ends).index(True)
