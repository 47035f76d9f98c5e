"""Inputs for which readers once failed, by target, and what becomes of each now."""

import json
from typing import Any

from verification.fuzz.mutations import to_json
from verification.fuzz.targets import DEVICE


def _tensors(**changes: Any) -> tuple[str, bytes]:
    """Return the second file of the target `checkpoint`, with another entry or other checksums of the tensor b."""
    entry = {"dtype": "BF16", "shape": [2, 3], "data_offsets": [48, 60], **changes}
    checksums = {"a": ["a16f0323419f3b61"], "b": entry.pop("checksums", ["7aa0647176968355"])}
    header = {"__metadata__": {"xxh3_64 of every 4 MiB": json.dumps(checksums)}}
    text = to_json({**header, "a": {"dtype": "F32", "shape": [3, 4], "data_offsets": [0, 48]}, "b": entry})
    data = b"".join(bytes([0, 0, *number]) for number in FLOATS) + b"\x80?" * 6
    return "rank-00001.safetensors", len(text).to_bytes(8, "little") + text + data


FLOATS = [b"@A", b"PA", b"`A", b"pA", b"\x80A", b"\x88A", b"\x90A", b"\x98A", b"\xa0A", b"\xa8A", b"\xb0A", b"\xb8A"]
DEVICE_WITHOUT_MUL = DEVICE.replace("operators.mul", "operators.add")
DEVICE_WITHOUT_POINTS = DEVICE.replace("points = [[1024, 1e-6], [1e6, 1e-4]]", "points = []")
DEVICE_WITH_TINY_RATES = DEVICE.replace("[[1024, 1e-6]", "[[1e-320, 1e-6]")
DEVICE_WITHOUT_ORDER = DEVICE.replace("[[1024, 1e-6], [1e6, 1e-4]]", "[[1e6, 1e-4], [1024, 1e-6]]")
DEVICE_WITH_A_NUMBER_FOR_A_TABLE = f"{DEVICE.partition('[measured')[0]}measured = 1.0\n"
FOUND: dict[str, list[tuple[Any, str]]] = {
    "checkpoint": [
        (_tensors(), "accepted"),
        (_tensors(data_offsets=[48, 60.0]), "rejected"),  # TypeError when the tensor was read
        (_tensors(checksums={"x": "7aa0647176968355"}), "rejected"),  # KeyError when the tensor was read
    ],
    "device_file": [
        (DEVICE.encode(), "accepted"),
        (DEVICE_WITHOUT_MUL.encode(), "rejected"),  # KeyError in a plan
        (DEVICE_WITHOUT_POINTS.encode(), "rejected"),  # IndexError in a plan
        (DEVICE_WITH_TINY_RATES.encode(), "rejected"),  # infinite seconds in a plan
        (DEVICE_WITHOUT_ORDER.encode(), "rejected"),  # the seconds of 1e6 bytes for 1024 bytes
        (DEVICE_WITH_A_NUMBER_FOR_A_TABLE.encode(), "rejected"),  # KeyError
    ],
}
