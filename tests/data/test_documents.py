"""Documents of text, JSON lines and parquet files and of the Hugging Face hub, and their errors."""

import bz2
import dataclasses
import gzip
import json
import lzma
import os
import pickle
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import datasets
import numpy as np
import pyarrow
import pytest

from tests.helpers.data import open_stream, rejection, rejections, source, texts_of, write
from titanlite.config.errors import TrainingError
from titanlite.data import documents, worker_process
from titanlite.data.files import files_of, read_rows, segment_of

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


@pytest.mark.parametrize("how", ["vanishes", "cannot be read"])
def test_a_file_that_changes_while_its_content_is_hashed_is_one_line(tmp_path, monkeypatch, how):
    file = write(tmp_path / "a.jsonl", ["a"])

    def files(_: Any) -> list[Path]:
        file.unlink(missing_ok=True)
        return [file]

    if how == "vanishes":
        monkeypatch.setattr(documents, "files_of", files)
    else:
        denied = PermissionError(13, "Permission denied")
        monkeypatch.setattr(documents, "open_file", mock.Mock(side_effect=denied))
    problem = {"vanishes": "FileNotFoundError: [Errno 2] No such file", "cannot be read": "PermissionError: [Errno 13]"}
    for line in rejections("json", file):
        assert line.startswith(f"{file}: cannot be read: {problem[how]}")


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
    sequences = open_stream("hub", "some/thing").read(0, 1)
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
    assert rejection(lambda: list(worker_process.readable_footers(damaged()))) == problem
    for line in rejections("parquet", path):
        assert line.startswith(problem)
    path.write_bytes(good)
    assert list(worker_process.readable_footers([path])) == [path]


def listed(capsys: pytest.CaptureFixture[str], dataset: str, path: Path, **options: Any) -> tuple[list[str], str]:
    """Return the texts of a path, and the line that says which files it stands for."""
    texts = texts_of(dataset, path, **options)
    return texts, capsys.readouterr().out.partition(": reads ")[2].rstrip()


def test_hidden_files_and_folders_are_left_out(tmp_path, capsys):
    for name in ("a.txt", ".ipynb_checkpoints/a-checkpoint.txt", "__MACOSX/._a.txt", ".a.txt"):
        write(tmp_path / ".data" / name, [name])
    texts, line = listed(capsys, "text", tmp_path / ".data")
    assert texts == ["a.txt"]
    hidden = ".a.txt, .ipynb_checkpoints/a-checkpoint.txt, __MACOSX/._a.txt"
    assert line == f"1: a.txt; left out as hidden: 3: {hidden}"
    assert texts_of("text", tmp_path / ".data" / ".a.txt") == [".a.txt"]


@pytest.mark.parametrize("end", ["gz", "GZ", "bz2", "xz", "zst"])
def test_suffixes_of_every_case_and_compression_are_read(tmp_path, capsys, end):
    pack = {"bz2": bz2.compress, "xz": lzma.compress, "zst": zstd}.get(end, gzip.compress)
    (tmp_path / "A.TXT").write_text("one")
    (tmp_path / f"b.txt.{end}").write_bytes(pack(b"tw") + pack(b"o"))
    (tmp_path / f"A.TXT.{end}").write_bytes(pack(b"one"))
    write(tmp_path / "c.md", ["no"])
    texts, line = listed(capsys, "text", tmp_path)
    assert texts == ["one", "two"]
    left_out = f"left out as there uncompressed: 1: A.TXT.{end}; left out as not ending in .txt: 1: c.md"
    assert line == f"2: A.TXT, b.txt.{end}; {left_out}"
    lines = tmp_path / f"d.jsonl.{end}"
    lines.write_bytes(pack(b'{"text": "three"}\n{"text": "four"}\n'))
    assert texts_of("json", tmp_path) == ["three", "four"]
    training = source("json", lines).training
    segment = segment_of(training, lines)
    first, second = read_rows(training, segment, ["text"])
    assert list(read_rows(training, segment._replace(begin=first.end), ["text"])) == [second]


def test_a_file_that_is_compressed_twice_is_read_once(tmp_path, capsys):
    for end, pack in (("gz", gzip.compress), ("bz2", bz2.compress), ("xz", lzma.compress)):
        (tmp_path / f"a.txt.{end}").write_bytes(pack(b"one"))
    left_out = "left out as there in another compression: 2: a.txt.gz, a.txt.xz"
    assert listed(capsys, "text", tmp_path) == (["one"], f"1: a.txt.bz2; {left_out}")
    (tmp_path / "a.txt").write_text("one")
    left_out = "left out as there uncompressed: 3: a.txt.bz2, a.txt.gz, a.txt.xz"
    assert listed(capsys, "text", tmp_path) == (["one"], f"1: a.txt; {left_out}")


def zstd(content: bytes) -> bytes:
    return pyarrow.compress(content, codec="zstd", asbytes=True)


SPLITS: dict[tuple[str, ...], tuple[str, str]] = {  # files: those that are read for training, and for validation
    ("train", "test"): ("train", "test"),
    ("train", "test", "dev"): ("train", "dev"),
    ("train-00000", "validation-00000", "more"): ("more train-00000", "validation-00000"),
    ("train/a", "val/a", "heldout/test_1"): ("train/a", "val/a"),
    ("wiki.train", "wiki.valid"): ("wiki.train", "wiki.valid"),
    ("TrainData", "testset"): ("TrainData", "testset"),
    ("test/train", "test/heldout"): ("test/train", "test/heldout"),
    ("a", "test"): ("a test", "a test"),
    ("train", "latest", "developer", "evaluate_testimony"): (
        "developer evaluate_testimony latest train",
        "developer evaluate_testimony latest train",
    ),
}


@pytest.mark.parametrize("pattern", ["", "**/*.jsonl"])
@pytest.mark.parametrize("names", SPLITS, ids=" ".join)
def test_splits_that_lie_together_are_not_mixed(tmp_path, capsys, names, pattern):
    for name in names:
        write(tmp_path / f"{name}.jsonl", [name])
    for option, expected in zip(("training", "validation"), SPLITS[names], strict=True):
        files = files_of(dataclasses.replace(source("json", tmp_path / pattern), path_option=f"{option}.dataset_path"))
        assert [str(file.relative_to(tmp_path).with_suffix("")) for file in files] == expected.split()
        n = len(names) - len(files)
        assert (f"left out as of another split: {n}: " in capsys.readouterr().out) == (n > 0)
    for name in names:
        assert texts_of("json", tmp_path / f"{name}.jsonl") == [name]


def test_files_that_are_not_read_tell_splits_apart_too(tmp_path, capsys):
    """A folder with train.csv says which split test.jsonl is of."""
    for name in ("train.csv", "test.jsonl", "more.jsonl"):
        write(tmp_path / name, [name])
    texts, line = listed(capsys, "json", tmp_path)
    assert texts == ["more.jsonl"]
    assert "left out as of another split: 1: test.jsonl" in line
    (tmp_path / "more.jsonl").unlink()
    for line in rejections("json", tmp_path):
        assert "left out as of another split: 1: test.jsonl" in line
    (tmp_path / "train.csv").rename(tmp_path / ".train.csv")
    assert texts_of("json", tmp_path) == ["test.jsonl"], "hidden files say nothing"


def test_linked_folders_are_named(tmp_path, capsys):
    write(tmp_path / "elsewhere" / "a.txt", ["a"])
    write(tmp_path / "data" / "b.txt", ["b"])
    (tmp_path / "data" / "link").symlink_to(tmp_path / "elsewhere")
    assert listed(capsys, "text", tmp_path / "data") == (["b"], "1: b.txt; left out as a linked folder: 1: link")


NO_TEXT = {
    "gzip": gzip.compress(gzip.compress(b"a")),
    "PDF": b"%PDF-1.7\n%\xe2\xe3",
    "zip": b"PK\3\4\x14\0",
    "parquet": b"PAR1\x15\4",
    "tar": bytes(257) + b"ustar",
    "UTF-16": "text".encode("utf-16"),
    "UTF-16 (iconv": "text, text".encode("utf-16-be"),
    "zeros": bytes(99),
    "a pointer of Git LFS": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n",
    "a pickle": pickle.dumps(["a"]),
}


@pytest.mark.parametrize("kind", NO_TEXT)
def test_what_is_no_text_is_named_by_what_it_is(tmp_path, kind):
    (tmp_path / "a.txt").write_bytes(NO_TEXT[kind])
    for sample_by in ("document", "line"):
        for line in rejections("text", tmp_path, text_sample_by=sample_by):
            assert f"{tmp_path}/a.txt: expected text in UTF-8, found {kind}" in line
