"""Model what torch.compile does with a block's operators, without compiling: neighbouring pointwise operators become
one kernel, and results that no other kernel reads are never written.

This is a model of inductor, not a run of it: all pointwise operators between two matrix multiplications, attentions or
collectives count as one fused kernel.
"""

from collections.abc import Sequence

from titanlite.tools.plan.op_trace import Allocation, Communication, Dispatch, Event, HostWait, Memory, Work

UNFUSED = ("fsdp.", "c10d.", "aten._foreach", "aten._fused", "aten.embedding", "aten.split_with_sizes")
"""Prefixes of the names of operators that keep a kernel of their own."""


def is_fusible(work: Work) -> bool:
    """Return whether an operator is pointwise, so that it can be part of a fused kernel."""
    return not work.flops and not work.name.startswith(UNFUSED)


def fuse(segments: Sequence[list[Event]]) -> list[list[Event]]:
    """Return the events of some segments with neighbouring operators fused; no kernel spans two segments. The first
    operator of a group has all the bytes that the group reads and writes. The others are gone, and so are allocations
    that only the group uses. The host dispatches one operator for each kernel, and none on DTensors."""
    group_of: dict[int, int] = {}  # by the operator's identity
    readers: dict[Allocation, set[int]] = {}
    writer: dict[Allocation, int] = {}
    group, members = 0, {}
    for segment in segments:
        group += 1
        for event in segment:
            separate = isinstance(event, (Communication, HostWait)) or (
                isinstance(event, Work) and not is_fusible(event)
            )
            group += separate
            if isinstance(event, Work):
                group_of[id(event)] = group
                members.setdefault(group, []).append(event)
                for allocation in event.inputs:
                    readers.setdefault(allocation, set()).add(group)
                for allocation in event.outputs:
                    writer.setdefault(allocation, group)
            group += separate
    internal = {
        allocation
        for allocation, number in writer.items()
        if is_fusible(members[number][0])
        and allocation.kind in ("temporary", "logits")
        and readers.get(allocation, set()) <= {number}
        and allocation.shape != ()
    }
    fused: list[list[Event]] = []
    for segment in segments:
        fused.append([])
        for event in segment:
            if isinstance(event, Work) and is_fusible(event):
                number = group_of[id(event)]
                if event is members[number][0]:
                    outputs = {allocation for work in members[number] for allocation in work.outputs}
                    own = {allocation for allocation in outputs if writer[allocation] == number}
                    fused[-1] += [Dispatch(1, 0), _kernel(members[number], own, internal)]
            elif isinstance(event, (Work, Communication)):
                fused[-1] += [Dispatch(1, 0), event]
            elif isinstance(event, HostWait) or (isinstance(event, Memory) and event.allocation not in internal):
                fused[-1].append(event)
    return fused


def _kernel(group: list[Work], own: set[Allocation], internal: set[Allocation]) -> Work:
    """Return a group of operators as one kernel. It does not read its own results, nor write the internal ones."""
    read, written = {}, {}
    for work in group:
        for allocation in set(work.inputs) - own:
            read[allocation] = max(read.get(allocation, 0), min(work.read, allocation.largest))
        for allocation in set(work.outputs) - internal:
            written[allocation] = max(written.get(allocation, 0), min(work.written, allocation.largest))
    sizes = {"read": sum(read.values()), "written": sum(written.values())}
    return group[0]._replace(inputs=tuple(read), outputs=tuple(written), **sizes)
