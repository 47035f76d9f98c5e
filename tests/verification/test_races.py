"""The races that races.py finds in short programs. (What it finds in training needs the null CUDA.)"""

import pytest

from verification.null_cuda.device import Operation
from verification.null_cuda.races import RECORD_STREAM, RELEASE, Access, Race, races

A, B, EVENT = 1, 2, 100


def program(*steps: tuple) -> list[Race]:
    """Return the races of a program. A step is an access (stream, "read" or "write" or RELEASE or RECORD_STREAM, first,
    end) or an operation (kind, stream, event)."""
    operations, accesses = list[Operation](), list[Access]()
    for step in steps:
        if isinstance(step[0], str):
            operations.append(Operation(step[0], step[1], step[2], "", 0))
        else:
            stream, name, first, end = step
            accesses.append(Access(len(operations), stream, first, end, name in ("write", RELEASE), name))
    return races([*operations, Operation("launch", A, 0, "", 0)], accesses)


RECORDED, WAITED = ("record", B, EVENT), ("wait", A, EVENT)


@pytest.mark.parametrize("earlier", ["read", "write"])
@pytest.mark.parametrize("later", ["read", "write"])
def test_two_streams_race_unless_both_read_or_one_waits(earlier: str, later: str):
    uses = (B, earlier, 0, 8), (A, later, 4, 12)
    expected = [] if earlier == later == "read" else [Race(earlier, later, 4)]
    assert program(*uses) == expected
    assert program(uses[0], RECORDED, WAITED, uses[1]) == []
    assert program(RECORDED, uses[0], WAITED, uses[1]) == expected, "the event was recorded before"
    assert program(uses[0], RECORDED, uses[1], WAITED) == expected, "the stream waits afterwards"


def test_order_is_transitive_and_the_host_orders_too():
    third = 3
    chain = ("record", third, 101), ("wait", A, 101)
    assert program((B, "write", 0, 8), RECORDED, ("wait", third, EVENT), *chain, (A, "write", 0, 8)) == []
    assert program((B, "write", 0, 8), ("sync stream", B, 0), (A, "write", 0, 8)) == []
    assert program((B, "write", 0, 8), RECORDED, ("sync event", 0, EVENT), (A, "write", 0, 8)) == []
    assert program((B, "write", 0, 8), ("sync device", 0, 0), (A, "write", 0, 8)) == []
    assert program((B, "write", 0, 8), ("sync stream", A, 0), (A, "write", 0, 8)) == [Race("write", "write", 8)]


def test_memory_may_be_used_again_when_its_stream_has_waited_for_others():
    release, again = (A, RELEASE, 0, 8), (A, "write", 64, 72)
    assert program((B, "read", 0, 8), release, again) == [Race("read", RELEASE, 8)]
    assert program((B, "read", 0, 8), release) == [], "nothing uses it again"
    assert program((B, "read", 0, 8), RECORDED, WAITED, release, again) == []
    assert program((B, "read", 0, 8), RECORDED, release, WAITED, again) == [], "before it does anything else"
    assert program((B, "read", 0, 8), release, again, RECORDED, WAITED, again) == [Race("read", RELEASE, 8)]
    assert program((A, "read", 0, 8), release, again) == []


def test_the_allocator_is_told_of_a_stream_until_the_release():
    release, again = (A, RELEASE, 0, 8), (A, "write", 0, 8)
    told = (B, RECORD_STREAM, 0, 8)
    assert program(told, (B, "read", 0, 8), release, again) == []
    assert program((B, RECORD_STREAM, 8, 16), (B, "read", 0, 8), release, again) == [Race("read", RELEASE, 8)]
    assert program((3, RECORD_STREAM, 0, 8), (B, "read", 0, 8), release, again) == [Race("read", RELEASE, 8)]
    twice = (told, (B, "read", 0, 8), release, (B, "read", 0, 8), release, again)
    assert program(*twice) == [Race("read", RELEASE, 8)], "it was told of the memory's first use only"


def test_bytes_that_no_other_stream_used_are_no_race():
    uses = [(B, "write", first, first + 2) for first in (0, 4, 8)]
    assert program(*uses, (A, "read", 2, 4), (A, "read", 6, 8)) == []
    assert program(*uses, (A, "read", 1, 9)) == [Race("write", "read", size) for size in (1, 2, 1)]


def test_collectives_use_memory_and_torch_tells_the_allocator():
    def of_nccl(kind: str) -> Operation:
        return Operation(kind, B, 8, "nccl", 8)

    def found(*uses: Access, kind: str) -> list[Race]:
        return races([of_nccl(kind), Operation("launch", A, 0, "", 0)], list(uses))

    write, release = Access(1, A, 0, 16, True, "write"), Access(1, A, 0, 16, True, RELEASE)
    read = write._replace(writes=False, name="read")
    assert found(write, kind="collective") == found(write, kind="receive") == [Race("nccl", "write", 8)]
    assert found(read, kind="receive") == [Race("nccl", "read", 8)]
    assert found(read, kind="collective") == []
    assert found(release, write._replace(first=32, end=40), kind="receive") == []
