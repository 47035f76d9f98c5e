"""Files that must survive a crash, and errors that another start may not have."""

import errno
import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pyarrow.lib
import pytest
from pydantic import Field, ValidationError

from tests.helpers.data import source
from titanlite import config
from titanlite.checkpoint.manifest import read_json
from titanlite.config.errors import TrainingError
from titanlite.config.hf.values import read_json_object
from titanlite.config.loader import ConfigError
from titanlite.config.regular_file import read_file
from titanlite.data.documents import open_dataset, read_documents
from titanlite.files import durable as files
from titanlite.files.durable import Checksum, Int63, Record, cannot_read, checksum, is_transient, parse, replace_file
from titanlite.tools.plan.comparison import read_measurement

TRANSIENT = {
    "disk": OSError(errno.EIO, "Input/output error"),
    "network file system": OSError(errno.ESTALE, "Stale file handle"),
    "connection": ConnectionResetError(),
    "timeout": TimeoutError(),
}
LASTING = {
    "missing": FileNotFoundError(errno.ENOENT, "No such file"),
    "forbidden": PermissionError(errno.EACCES, "Permission denied"),
    "folder": IsADirectoryError(errno.EISDIR, "Is a directory"),
    "damaged gzip file": gzip.BadGzipFile("Not a gzipped file"),
    "damaged parquet file": pyarrow.lib.ArrowIOError("Couldn't deserialize thrift"),
    "format": ValueError("expected a list"),
    "name": OSError(errno.ENAMETOOLONG, "File name too long"),
    "kind": OSError(errno.EINVAL, "expected a regular file"),
    "size": OSError(errno.EFBIG, "expected at most 5 bytes"),
}


@pytest.mark.parametrize("name", [*TRANSIENT, *LASTING])
def test_errors_of_the_disk_and_the_network_are_transient(name: str):
    error = (TRANSIENT | LASTING)[name]
    assert is_transient(error) == (name in TRANSIENT)
    if isinstance(error, OSError):
        raised = cannot_read("some file", error)
        assert type(raised) is (TrainingError if name in TRANSIENT else ConfigError)
        assert str(raised).startswith("some file: cannot be read: ")


KINDS = {
    "pipe": (os.mkfifo, "expected a regular file"),
    "device": (lambda path: path.symlink_to("/dev/zero"), "expected a regular file"),
    "folder": (Path.mkdir, "Is a directory"),
    "large file": (lambda path: path.write_bytes(b"123456"), "expected at most 5 bytes"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_small_file_is_rejected_at_once(tmp_path, kind):
    create, problem = KINDS[kind]
    create(tmp_path / "file")
    with pytest.raises(OSError, match=problem) as raised:
        read_file(tmp_path / "file", 5)
    assert type(cannot_read("file", raised.value)) is ConfigError
    (tmp_path / "small").write_bytes(b"12345")
    assert read_file(tmp_path / "small", 5) == b"12345"


READERS: dict[str, Callable[[Path], object]] = {
    "config": lambda path: config.load([f"{path}/name.toml"]),
    "config.json of a model": lambda path: read_json_object(path / "name.toml"),
    "manifest of a checkpoint": lambda path: read_json(path / "name.toml"),
    "metrics of a run": lambda path: read_measurement(path / "name.toml"),
    "text": lambda path: read_texts(path, "text"),
    "JSON lines": lambda path: read_texts(path, "json"),
    "parquet": lambda path: read_texts(path, "parquet"),
}


def read_texts(path: Path, kind: str) -> object:
    named = source(kind, path / "name.toml")
    return [list(read_documents(named, segment)) for segment in open_dataset(named)[0]]


@pytest.mark.parametrize("kind", ["pipe", "device"])
@pytest.mark.parametrize("reader", READERS)
def test_no_reader_waits_for_a_pipe_or_reads_a_device(tmp_path, reader, kind):
    KINDS[kind][0](tmp_path / "name.toml")
    with pytest.raises(ConfigError) as raised:
        READERS[reader](tmp_path)
    (line,) = raised.value.problems
    assert f"{tmp_path}/name.toml" in line
    assert "a regular file" in line


@pytest.mark.parametrize("fails", ["os.fsync", "pathlib.Path.replace"])
def test_a_file_that_cannot_be_replaced_keeps_its_content(tmp_path, fails):
    path = tmp_path / "some.json"
    replace_file(path, b"first")
    assert path.read_bytes() == b"first"
    with (
        mock.patch(fails, side_effect=OSError(errno.EIO, "Input/output error")),
        pytest.raises(OSError, match="output"),
    ):
        replace_file(path, b"second")
    assert path.read_bytes() == b"first"
    assert list(tmp_path.iterdir()) == [path]


def test_a_replaced_file_is_on_the_disk_before_it_has_its_name(tmp_path):
    calls = mock.Mock()
    with (
        mock.patch.object(files.os, "fsync", calls.fsync),
        mock.patch("pathlib.Path.replace", calls.replace),
    ):
        replace_file(tmp_path / "some.json", b"content")
    assert [name for name, _, _ in calls.mock_calls] == ["fsync", "replace", "fsync"]


class Counts(Record):
    """Counts of things."""

    counts: dict[str, int] = Field(max_length=2)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ({"counts": {"a": "1"}}, "some.json: counts.a: Input should be a valid integer"),
        ({"counts": {"a": 1.0}}, "some.json: counts.a: Input should be a valid integer"),
        ({"counts": {}, "more": 1}, "some.json: more: Extra inputs are not permitted"),
        ({}, "some.json: counts: Field required"),
    ],
    ids=json.dumps,
)
def test_the_first_problem_of_a_record_is_named(content, problem):
    assert parse(Counts, {"counts": {"a": 1}}, "some.json").counts == {"a": 1}
    with pytest.raises(ConfigError) as raised:
        parse(Counts, content, "some.json")
    assert str(raised.value) == problem


def test_a_problem_of_a_record_has_no_control_characters():
    with pytest.raises(ValidationError) as raised:
        Counts.model_validate({"counts": {}, "\x1b[2J": 1})
    assert files.first_problem(raised.value) == "\\x1b[2J: Extra inputs are not permitted"


class Entry(Record):
    """What a file must be."""

    bytes: Int63
    xxh3_64: Checksum


def test_a_checksum_is_that_of_other_programs():
    """XXH3 of no bytes is this value in every implementation."""
    assert checksum(b"") == checksum(memoryview(b"")) == "2d06800538d394c2"
    assert parse(Entry, {"bytes": 2**63 - 1, "xxh3_64": checksum(b"")}, "some.json").bytes == 2**63 - 1


@pytest.mark.parametrize("count", [-1, 2**63])
def test_a_count_out_of_range_is_rejected(count):
    with pytest.raises(ConfigError, match=r"^some\.json: bytes: Input should be (greater|less) than"):
        parse(Entry, {"bytes": count, "xxh3_64": "0" * 16}, "some.json")


@pytest.mark.parametrize("text", ["", "0" * 15, "0" * 17, "A" * 16, "0" * 16 + "\n"])
def test_a_text_that_is_no_checksum_is_rejected(text):
    with pytest.raises(ConfigError, match=r"^some\.json: xxh3_64: String should match pattern"):
        parse(Entry, {"bytes": 0, "xxh3_64": text}, "some.json")
