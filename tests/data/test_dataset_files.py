"""Rows of text, JSON and parquet files: the same from every place on, and errors that name the file and the row."""

import gzip
import itertools
import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.data import rejection, training, write
from titanlite.data import files
from titanlite.data.files import END, Segment, read_rows, segment_of

KINDS = {
    "line": {"dataset": "text", "text_sample_by": "line"},
    "paragraph": {"dataset": "text", "text_sample_by": "paragraph"},
    "document": {"dataset": "text", "text_sample_by": "document"},
    "json": {"dataset": "json"},
    "parquet": {"dataset": "parquet"},
}


def rows(kind: str, segment: Segment) -> list[Any]:
    return list(read_rows(training(**KINDS[kind]), segment, ["text"]))


def texts(kind: str, path: Path, begin: int = 0, end: int | None = None) -> list[str]:
    segment = segment_of(training(**KINDS[kind]), path)
    end = segment.end if end is None else end
    return [row.values["text"] for row in rows(kind, segment._replace(begin=begin, end=end))]


@settings(max_examples=60, deadline=None)
@given(
    fragments=st.lists(st.sampled_from(["a", "bc", "é", "\n", "\n\n", "\r\n", "\r\n\r\n", " ", "\t"]), max_size=24),
    limits=st.lists(st.integers(0, 60), max_size=4),
    kind=st.sampled_from(["line", "paragraph"]),
)
def test_segments_of_a_text_have_each_row_once(tmp_path_factory, fragments, limits, kind):
    """However the bytes are partitioned, and wherever reading resumes."""
    path = tmp_path_factory.mktemp("text") / "a.txt"
    path.write_bytes("".join(fragments).encode())
    size = path.stat().st_size
    segment = Segment(str(path), 0, size, size)
    complete = rows(kind, segment)
    limits = [0, *sorted(min(limit, size) for limit in limits), size]
    of_segments = [rows(kind, segment._replace(begin=a, end=b)) for a, b in itertools.pairwise(limits)]
    assert [row for each in of_segments for row in each] == complete
    for number, row in enumerate(complete):
        assert rows(kind, segment._replace(begin=row.end)) == complete[number + 1 :]
    expected = "".join(fragments).replace("\r\n", "\n")
    if kind == "line":
        assert [row.values["text"] for row in complete] == expected.removesuffix("\n").split("\n") * bool(expected)
    else:
        assert "".join(row.values["text"] for row in complete).replace("\n", "") == expected.replace("\n", "")
        assert all("\n\n" not in row.values["text"] and row.values["text"] for row in complete)


@pytest.mark.parametrize("kind", ["json", "parquet", "array", "gz"])
def test_rows_from_any_place_on(tmp_path, kind):
    expected = [f"row {number} é\n" for number in range(7)]
    name = {"json": "a.jsonl", "parquet": "a.parquet", "array": "a.json", "gz": "a.jsonl.gz"}[kind]
    path = tmp_path / name
    if kind == "array":
        path.write_text(json.dumps([{"text": text, "id": 1} for text in expected]))
    else:
        write(tmp_path / name.removesuffix(".gz"), expected)
    if kind == "gz":
        path.write_bytes(gzip.compress((tmp_path / "a.jsonl").read_bytes()))
    kind = "parquet" if kind == "parquet" else "json"
    complete = rows(kind, segment_of(training(dataset=kind), path))
    assert [row.values for row in complete] == [{"text": text} for text in expected]
    segment = segment_of(training(dataset=kind), path)
    for number, row in enumerate(complete):
        assert rows(kind, segment._replace(begin=row.end)) == complete[number + 1 :]
        assert rows(kind, segment._replace(end=row.end)) == complete[: number + 1]


def test_byte_order_marks_line_ends_nul_and_empty_lines(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfone\r\ntwo\0\rtwo\n\n\nthree\r\n\r\nfour")
    assert texts("line", path) == ["one", "two\0\ntwo", "", "", "three", "", "four"]
    assert texts("paragraph", path) == ["one\ntwo\0\ntwo", "three", "four"]
    assert texts("document", path) == ["one\ntwo\0\ntwo\n\n\nthree\n\nfour"]
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "one\\u0000"}\r\n\n  \n{"text": "two"}')
    assert texts("json", path) == ["one\0", "two"]
    path = tmp_path / "b.json"
    path.write_bytes(b'\xef\xbb\xbf\n [{"text": "one"}]')
    assert texts("json", path) == ["one"]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ('{"text": "a"}\n\n{"text": ', "line 3: no JSON: "),
        ('{"text": "a"}\n5', "line 2: expected a JSON object, found a value of type int"),
        ('{"text": "a"}\n{"txt": "a", "b": 1}', 'line 2: no column "text"; it has txt, b'),
        ("[" * 100_000, "cannot be read: RecursionError"),
        ('{"text": "a"}\n' + '{"a":' * 100_000, "line 2: JSON that is nested too deep"),
        ('[{"text": "a"}, 7]', "row 2: expected a JSON object"),
        ('[{"text": "a"}, ', "cannot be read: JSONDecodeError"),
    ],
)
def test_errors_name_the_file_and_the_row(tmp_path, content, problem):
    path = tmp_path / "a.json"
    path.write_text(content)
    line = rejection(lambda: texts("json", path))
    assert line.startswith(f"{path}")
    assert problem in line


@pytest.mark.parametrize("bit", range(7))
def test_a_parquet_file_that_lacks_rows_is_rejected(tmp_path, bit):
    """pyarrow skips a page of an unknown type silently. A page's header begins with its type."""
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(
        pyarrow.table({"text": ["a", "b", "c", "d"]}), path, row_group_size=2, use_dictionary=False
    )
    data = bytearray(path.read_bytes())
    data[5] ^= 2**bit
    path.write_bytes(data)
    problem = "says that it has 4 rows, and lacks some or has more: it is damaged"
    assert rejection(lambda: texts("parquet", path)) == f"{path}: {problem}"


def test_text_that_is_no_utf8_names_the_line(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"one\ntwo\n\xff\n")
    assert rejection(lambda: texts("line", path)).startswith(f"{path}, line 3: no UTF-8: ")


def test_a_row_that_is_too_long_is_rejected(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "LARGEST_ROW", 100)
    path = tmp_path / "a.txt"
    path.write_text("short\n" + "x" * 101 + "\n")
    assert rejection(lambda: texts("line", path)) == f"{path}, line 2: longer than 100 bytes"
    assert "a document of more than 100 bytes" in rejection(lambda: texts("document", path))
    path.write_text("short\n\n" + "x\n" * 60)
    assert f"{path}, line 3: a paragraph of more than 100 bytes" in rejection(lambda: texts("paragraph", path))
    json_path = write(tmp_path / "a.jsonl", ["x" * 101])
    assert rejection(lambda: texts("json", json_path)) == f"{json_path}, line 1: longer than 100 bytes"
    parquet = write(tmp_path / "a.parquet", ["short", "x" * 101])
    assert rejection(lambda: texts("parquet", parquet)) == f"{parquet}, row 2: longer than 100 bytes"


@pytest.mark.parametrize(
    ("n_rows", "n_bytes", "expected"), [(1000, 10**6, 256), (1000, 10**9, 16), (10, 10**9, 1), (0, 0, 1), (5, 0, 256)]
)
def test_few_long_rows_are_read_together(n_rows, n_bytes, expected):
    assert files.rows_at_a_time(n_rows, n_bytes) == expected


def test_long_rows_of_parquet_are_read_one_by_one(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "BYTES_AT_A_TIME", 1000)
    read: list[int] = []
    real = pyarrow.parquet.ParquetFile.iter_batches
    monkeypatch.setattr(
        pyarrow.parquet.ParquetFile, "iter_batches", lambda self, **o: read.append(o["batch_size"]) or real(self, **o)
    )
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": ["x" * 900, "y" * 900], "other": ["z" * 10**5] * 2}), path)
    assert texts("parquet", path) == ["x" * 900, "y" * 900]
    assert read == [1]


def test_compressed_files_and_arrays_are_not_split(tmp_path):
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n'))
    (tmp_path / "b.json").write_text("[]")
    for name in ("a.jsonl.gz", "b.json"):
        segment = segment_of(training(dataset="json"), tmp_path / name)
        assert segment.end == END
        assert not files.is_splittable(segment)
