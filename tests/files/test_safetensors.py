"""Reading parts of a safetensors file."""

import pytest

from titanlite.files.safetensors import DamagedError, read_fully


def test_reading_past_the_end_is_damage(tmp_path):
    (tmp_path / "file").write_bytes(bytes(range(10)))
    data = bytearray(6)
    with (tmp_path / "file").open("rb") as file:
        read_fully(file, memoryview(data), 4)
        assert data == bytes(range(4, 10))
        with pytest.raises(DamagedError, match="it ends before byte 11"):
            read_fully(file, memoryview(data), 5)
