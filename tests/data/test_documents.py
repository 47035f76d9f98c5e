"""Documents of text, JSON lines and parquet files and of the Hugging Face hub, and their errors."""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import datasets
import numpy as np
import pytest

from tests.helpers.data import open_stream, rejection, rejections, source, texts_of, write
from titanlite.config.errors import TrainingError
from titanlite.data import documents

pytestmark = pytest.mark.usefixtures("offline")


def test_text_json_and_parquet_files(tmp_path):
    write(tmp_path / "a.txt", ["one", "two", "", "three", ""])
    write(tmp_path / "b.txt", ["four"])
    assert texts_of("text", tmp_path) == ["one\ntwo\n\nthree\n", "four"]
    assert texts_of("text", tmp_path, text_sample_by="paragraph") == ["one\ntwo", "three", "four"]
    assert texts_of("text", tmp_path, text_sample_by="line") == ["one", "two", "", "three", "four"]
    write(tmp_path / "lines.jsonl", ["one", "two\nlines"])
    (tmp_path / "list.json").write_text(json.dumps([{"text": "three", "other": "2!", "id": 0}]))
    assert texts_of("json", tmp_path / "lines.jsonl") == ["one", "two\nlines"]
    assert texts_of("json", tmp_path) == ["one", "two\nlines", "three"]
    assert texts_of("json", tmp_path, dataset_text_key="other") == ["0!", "1!", "2!"]
    write(tmp_path / "rows.parquet", [f"row {i}" for i in range(5)])
    assert texts_of("parquet", tmp_path) == [f"row {i}" for i in range(5)]


def test_folders_and_globs_are_read_in_sorted_order(tmp_path, monkeypatch):
    for name in ("b/2", "b/10", "a/z", "c", "run[1]"):
        write(tmp_path / f"{name}.txt", [name])
    (tmp_path / "a" / "note.md").write_text("not one of them")
    assert texts_of("text", tmp_path) == ["a/z", "b/10", "b/2", "c", "run[1]"]
    assert texts_of("text", tmp_path / "b" / "*.txt") == ["b/10", "b/2"]
    assert texts_of("text", tmp_path / "[ab]" / "?.txt") == ["a/z", "b/2"]
    assert texts_of("text", f"{tmp_path}/**/z.txt") == ["a/z"]
    assert texts_of("text", tmp_path / "run[1].txt") == ["run[1]"], "a file's name is no pattern"
    monkeypatch.chdir(tmp_path)
    assert texts_of("text", "b/1*.txt") == ["b/10"]
    monkeypatch.setenv("HOME", str(tmp_path / "b"))
    assert texts_of("text", "~/2.txt") == ["b/2"]


@pytest.mark.parametrize("size", [10, 2**16 + 1, 2**20])
def test_another_text_with_the_same_time_and_size_is_noticed(tmp_path, size):
    """Unpacked archives and image layers have files of one fixed time."""
    file = tmp_path / "a.txt"
    identities = set()
    for place in np.linspace(0, size - 1, 10, dtype=int):
        text = "a" * place + "b" + "a" * (size - 1 - place)
        os.utime(write(file, [text]), (1e9, 1e9))
        assert texts_of("text", file) == [text]
        identities |= {documents.open_dataset(source("text", file))[1], documents.open_stream(source("text", file))[1]}
    assert len(identities) == 20


@pytest.mark.parametrize(
    ("dataset", "path", "reason"),
    [("text", "nowhere", "no such file"), ("text", "*.txt", "no such file"), ("parquet", ".", "ends in .parquet")],
)
def test_missing_files_are_rejected(tmp_path, dataset, path, reason):
    for line in rejections(dataset, tmp_path / path):
        assert line.startswith(f'training.dataset_path = "{tmp_path / path}": no ')
        assert reason in line


@pytest.mark.parametrize("alone", [True, False], ids=["alone", "beside a good file"])
@pytest.mark.parametrize("path", ["", "*", "bad.txt"], ids=["folder", "glob", "file"])
@pytest.mark.parametrize("kind", ["/nowhere", "/dev/zero", "pipe"])
def test_what_is_no_file_is_not_left_out(tmp_path, kind, path, alone):
    bad = tmp_path / "bad.txt"
    if kind == "pipe":
        os.mkfifo(bad)
    else:
        bad.symlink_to(kind)
    if not alone:
        (tmp_path / "good.txt").write_text("good")
    for line in rejections("text", tmp_path / path):
        assert line.endswith(f": {bad}: expected a regular file, or a link to one, with a name in UTF-8")


def test_a_file_whose_name_is_not_utf8_is_rejected(tmp_path):
    """Its name is part of what processes tell each other, and of error lines."""
    (tmp_path / "good.txt").write_text("good")
    (tmp_path / "bad\udcff.txt").write_text("bad")
    for line in rejections("text", tmp_path):
        assert line.endswith(
            f": {tmp_path}/bad\\udcff.txt: expected a regular file, or a link to one, with a name in UTF-8"
        )


@pytest.mark.parametrize("kind", ["json", pytest.param("parquet", marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    ("texts", "text_key", "reason"),
    [
        (["one"], "no", 'no column "no"; it has text, other, id (training.dataset_text_key)'),
        (["one"], "id", 'column "id" holds a value of type int where a document\'s text is expected'),
        (["one", "two", None], "text", 'column "text" holds no text (null) where a document\'s text is expected'),
        ([None], "text", 'column "text" holds no text (null) where a document\'s text is expected'),
        ([["one"]], "text", 'column "text" holds a value of type list where a document\'s text is expected'),
    ],
)
def test_a_column_that_is_no_text_is_rejected(tmp_path, kind, texts, text_key, reason):
    file = write(tmp_path / f"a.{kind}", texts)
    row = f"row {len(texts)}" if kind == "parquet" else f"line {len(texts)}"
    where = f'training.dataset_path = "{file}": {file}, {row}: '
    if reason.startswith("no "):
        where = f"{file}: " if kind == "parquet" else f"{file}, line 1: "
    assert list(rejections(kind, file, dataset_text_key=text_key)) == [where + reason] * 2


def test_an_empty_file_is_rejected_where_it_is_streamed(tmp_path):
    (tmp_path / "a.jsonl").touch()
    line = rejection(lambda: open_stream("json", tmp_path))
    assert line == f'training.dataset_path = "{tmp_path}": has no documents'


@pytest.mark.parametrize(
    ("dataset", "reason"),
    [
        ("json", ", line 1: no JSON: 'utf-8' "),
        ("parquet", ": cannot be read: ArrowInvalid: Parquet"),
        ("text", ": no UTF-8: "),
    ],
)
def test_broken_files_are_rejected_with_the_reason(tmp_path, dataset, reason):
    ending = "txt" if dataset == "text" else dataset
    write(tmp_path / f"0.{ending}", ["good"])
    broken = tmp_path / f"1.{ending}"
    broken.write_bytes(b"{\xff\xfe")
    for line in rejections(dataset, tmp_path):
        assert line.startswith(f"{broken}{reason}")


@pytest.mark.parametrize(
    ("dataset", "path", "named"),
    [("hub", "some/thing", 'training.dataset_path = "some/thing"'), ("c4", "", 'training.dataset = "c4"')],
)
def test_the_hub_without_a_network_is_one_clear_line(dataset, path, named):
    began = time.monotonic()
    for line in rejections(dataset, path):
        assert line.startswith(f"{named}: cannot be loaded: ")
        assert "without a network, download its files elsewhere" in line
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ConnectionResetError("reset by peer"), "ConnectionResetError: reset by peer"),
        (ValueError("expected\na list"), "ValueError: expected a list"),
        (FileNotFoundError(), "FileNotFoundError: FileNotFoundError"),
    ],
    ids=["transient", "two lines", "no text"],
)
def test_errors_of_the_hub_while_streaming_are_training_errors(monkeypatch, error, reason):
    """Whatever the error is, another start may succeed: the dataset was there when it was opened."""

    def documents():
        yield {"text": "longer than one sequence"}
        raise RuntimeError("what wraps the reason") from error

    monkeypatch.setattr(datasets, "load_dataset", lambda **_: datasets.IterableDataset.from_generator(documents))
    sequences = open_stream("hub", "some/thing").read(0, 1, {})
    next(sequences)
    with pytest.raises(TrainingError) as raised:
        next(sequences)
    message = str(raised.value)
    assert message.startswith(f'training.dataset_path = "some/thing": cannot be read: {reason}; without a network, ')
    assert "\n" not in message


def test_a_footer_at_which_pyarrow_ends_its_process_is_rejected(tmp_path):
    """Some flipped bit of a footer has it abort."""
    path = write(tmp_path / "some.parquet", ["hello world " * 20] * 50)
    good = path.read_bytes()
    begin = len(good) - 8 - int.from_bytes(good[-8:-4], "little")

    def damaged() -> Iterator[Path]:
        for bit in range(8 * begin, 8 * len(good)):
            content = bytearray(good)
            content[bit // 8] ^= 1 << bit % 8
            path.write_bytes(content)
            yield path

    problem = f"{path}: reading its footer crashes (SIGABRT) or takes more than 1.75 GiB of memory; correct it"
    assert rejection(lambda: list(documents.survivors(damaged()))) == problem
    for line in rejections("parquet", path):
        assert line.startswith(problem)
    path.write_bytes(good)
    assert list(documents.survivors([path])) == [path]
