"""What torch.compile makes of a block's operators, without compiling: neighbours that only read and write elements
become one kernel, and what no other kernel reads is never written.

This is a model of inductor, not its run: every operator between two matrix products, attentions or collectives counts
as fused with its neighbours.
"""

from collections.abc import Sequence

from titanlite.plan.op_trace import Event, Memory, Piece, Traffic, Work

ALONE = ("fsdp.", "c10d.", "aten._foreach", "aten._fused", "aten.embedding", "aten.split_with_sizes")
"""Beginnings of the names of operators that keep a kernel of their own."""


def is_fusible(work: Work) -> bool:
    """Whether it goes over elements, and may so be part of a larger kernel."""
    return not work.flops and not work.name.startswith(ALONE)


def fuse(parts: Sequence[list[Event]]) -> list[list[Event]]:
    """The same events with neighbours fused: a group's first operator has all that the group reads and writes, and the
    others are gone; so are pieces that only the group knows.

    Args:
        parts: what is compiled as one; no kernel reaches from one into the next.
    """
    group_of: dict[int, int] = {}  # by the operator's identity
    readers: dict[Piece, set[int]] = {}
    writer: dict[Piece, int] = {}
    group, members = 0, {}
    for part in parts:
        group += 1
        for event in part:
            if isinstance(event, Traffic) or (isinstance(event, Work) and not is_fusible(event)):
                group += 1
            if isinstance(event, Work):
                group_of[id(event)] = group
                members.setdefault(group, []).append(event)
                for piece in event.inputs:
                    readers.setdefault(piece, set()).add(group)
                for piece in event.outputs:
                    writer.setdefault(piece, group)
            if isinstance(event, Traffic) or (isinstance(event, Work) and not is_fusible(event)):
                group += 1
    inner = {
        piece
        for piece, number in writer.items()
        if is_fusible(members[number][0])
        and piece.kind in ("temporary", "logits")
        and readers.get(piece, set()) <= {number}
        and piece.shape != ()
    }
    return [[new for event in part if (new := _fused(event, members, group_of, inner, writer))] for part in parts]


def _fused(
    event: Event,
    members: dict[int, list[Work]],
    group_of: dict[int, int],
    inner: set[Piece],
    writer: dict[Piece, int],
) -> Event | None:
    """What becomes of an event; None: nothing."""
    if isinstance(event, Memory):
        return None if event.piece in inner else event
    if not isinstance(event, Work) or not is_fusible(event):
        return event
    number = group_of[id(event)]
    group = members[number]
    if event is not group[0]:
        return None
    read, written = {}, {}
    for work in group:
        for piece in work.inputs:
            if writer.get(piece) != number:
                read[piece] = max(read.get(piece, 0), min(work.read, piece.largest))
        for piece in work.outputs:
            if piece not in inner:
                written[piece] = max(written.get(piece, 0), min(work.written, piece.largest))
    return event._replace(read=sum(read.values()), written=sum(written.values()))
