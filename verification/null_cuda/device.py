"""What was asked of the device of the null CUDA, in the process that runs on it."""

import ctypes
import traceback
from collections import Counter
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
KINDS = (
    "launch", "collective", "receive", "record", "wait", "sync stream", "sync event", "sync device", "copy to host",
    "copy to device", "copy on device", "copy pageable", "fill", "communicator",
)  # fmt: skip
"""As in null_cuda.h."""


class Operation(NamedTuple):
    """What null_cuda.h says of it. Streams and objects are addresses."""

    kind: str
    stream: int
    object: int
    name: str
    bytes: int


class _Operation(ctypes.Structure):
    _fields_ = [
        ("kind", ctypes.c_int),
        ("stream", ctypes.c_size_t),
        ("object", ctypes.c_size_t),
        ("name", ctypes.c_char_p),
        ("bytes", ctypes.c_size_t),
    ]


_HOOK = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_size_t)


class Device:
    """The log of one process: `begin`, do something, and read `operations` and `waits`."""

    def __init__(self) -> None:
        self.runtime = ctypes.CDLL(None)  # preloaded
        self.runtime.null_cuda_operations.restype = ctypes.c_size_t
        self.waits: Counter[tuple[str, str]] = Counter()
        """How often the host waited, by kind and by the line of the project that made it wait."""
        self.hook = _HOOK(self._wait)
        self.runtime.null_cuda_set_hook(self.hook)

    def begin(self) -> None:
        """Forget what was asked so far, and log from now on."""
        self.waits.clear()
        self.runtime.null_cuda_open_log()

    def operations(self) -> list[Operation]:
        """Return what was asked since `begin`."""
        first = ctypes.POINTER(_Operation)()
        count = self.runtime.null_cuda_operations(ctypes.byref(first))
        each = (first[i] for i in range(count))
        return [Operation(KINDS[o.kind], o.stream, o.object, (o.name or b"").decode(), o.bytes) for o in each]

    def n_operations(self) -> int:
        """Return how many operations were asked since `begin`."""
        return self.runtime.null_cuda_operations(ctypes.byref(ctypes.POINTER(_Operation)()))

    def _wait(self, kind: int, size: int) -> None:
        frames = [frame for frame in traceback.extract_stack()[:-1] if _is_ours(frame.filename)]
        line = f"{Path(frames[-1].filename).relative_to(ROOT)} {frames[-1].name}" if frames else "?"
        self.waits[KINDS[kind], line] += 1


def _is_ours(file: str) -> bool:
    return file.startswith(f"{ROOT}/titanlite")


def count(operations: list[Operation], kind: str) -> Counter[str]:
    """Return how many operations of a kind there are, by name."""
    return Counter(each.name for each in operations if each.kind == kind)
