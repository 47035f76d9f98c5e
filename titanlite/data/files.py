"""Find the files of a dataset, such as those in a folder, and read the rows of text, JSON and parquet files.

A segment is a range of a file's rows. The unit of a segment's `begin` and `end` depends on the file:

    text by line or paragraph, JSON lines    bytes of uncompressed text; a row is in the segment in which it begins
    parquet, JSON arrays                     rows
    text by document                         files: the file is a single row, number 0
"""

import bz2
import contextlib
import glob
import gzip
import io
import itertools
import json
import lzma
import os
import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from titanlite.config.errors import TrainingError
from titanlite.config.loader import ConfigError, printable, read_toml, show
from titanlite.config.regular_file import open_file
from titanlite.config.schema import Training
from titanlite.data.source import Source, columns_of
from titanlite.files.durable import is_transient

SUFFIXES = {"text": (".txt",), "json": (".json", ".jsonl"), "parquet": (".parquet",)}
"""Suffixes, in any case, of the files that are read from a folder. Text and JSON files may be compressed, too."""
TOOLS = "tools"  # optional column of a conversation's row, with the tools that the assistant may call
COMPRESSED = re.compile(r"\.(gz|bz2|xz|zst)$", re.IGNORECASE)
SPLIT = re.compile(
    r"(?<![a-z])(?:(train)|(val|valid|validate|dev)|(test|eval|held.?out|hold.?out))"
    r"(?:ing|ation|uation|s|sets?|data|split)?(?![a-z])"
)
"""Words in file names that name a split; the groups 1 to 3 are training, validation, test. The last word counts."""

LARGEST_ROW = 2**26  # maximum bytes of a row, since several copies of it are in memory while it is read
BYTES_AT_A_TIME = 2**24  # approximate bytes of a table's rows that are read together
END = 2**62  # value of `end` in a segment whose number of rows or bytes is unknown
BOM = b"\xef\xbb\xbf"
KINDS = {kind: text.encode() for kind, text in read_toml(str(Path(__file__).with_name("kinds.toml"))).items()}
"""Regular expressions that match the first bytes of files that are not UTF-8 text, by the kind of file."""


class Segment(NamedTuple):
    """A range of a dataset's rows."""

    file: str
    begin: int
    end: int
    bytes: int
    """Approximate bytes of the file in this segment, to show progress and to partition a dataset evenly."""


class Row(NamedTuple):
    """A row of a file, with the positions at which this row and the next row begin."""

    begin: int
    end: int
    values: dict[str, Any]  # values by column; a row of a text file has the column "text" only
    others: Collection[str] = ()  # columns of the row that are not read


class BadRowError(Exception):
    """A row cannot be read; the arguments are the row's position and the reason."""


def files_of(source: Source) -> list[Path]:
    """Return the files that a path, folder or glob names, in the same order on every machine. For a folder or glob,
    print some of their names, and which files are left out. Raises ConfigError if there is no file."""
    path = Path(os.path.expanduser(source.training.dataset_path))
    names, reasons, is_folder = {path.name: path}, dict[str, str](), path.is_dir()
    if is_folder or not path.exists():
        found = path.rglob("*") if is_folder else map(Path, glob.glob(str(path), recursive=True))
        files = sorted(file for file in found if file.is_symlink() or not file.is_dir())
        root = path if is_folder or not files else Path(os.path.commonpath([file.parent for file in files]))
        names = {str(file.relative_to(root)): file for file in files}
        reasons = _left_out(source, names, is_folder=is_folder)
    left_out = {reason: [name for name, own in reasons.items() if own == reason] for reason in reasons.values()}
    line = "".join(f"; left out as {reason}: {_listed(own)}" for reason, own in left_out.items())
    read = [name for name in names if name not in reasons]
    if not read:
        suffixes = " or ".join(SUFFIXES[source.training.dataset])
        problem = f"no file in it ends in {suffixes}" if is_folder else "no such file or folder"
        raise ConfigError([f"{source}: {problem}{line}"])
    files = [names[name] for name in read]
    for file in files:
        if not file.is_file() or str(file).encode(errors="ignore").decode() != str(file):
            raise ConfigError([f"{source}: {file}: expected a regular file, or a link to one, with a name in UTF-8"])
    if files != [path]:
        print(printable(f"{source}: reads {_listed(read)}{line}"), flush=True)
    return files


def _left_out(source: Source, files: dict[str, Path], *, is_folder: bool) -> dict[str, str]:
    """Return why files of a folder or glob are left out: a reason for each path, relative to the common folder."""
    suffixes, reasons, first = SUFFIXES[source.training.dataset], dict[str, str](), dict[str, str]()
    for name, file in files.items():
        unpacked = name if source.training.dataset == "parquet" else COMPRESSED.sub("", name)
        if file.is_dir():
            reasons[name] = "a linked folder"
        elif is_folder and any(part.startswith(".") for part in Path(name).parts):
            reasons[name] = "hidden"
        elif is_folder and not unpacked.lower().endswith(suffixes):
            reasons[name] = f"not ending in {' or '.join(suffixes)}"
        elif (other := first.setdefault(unpacked, name)) != name:
            reasons[name] = "there uncompressed" if other == unpacked else "there in another compression"
    words = {name: SPLIT.finditer(name.lower()) for name in files if reasons.get(name) != "hidden"}
    splits = {name: [0, *(word.lastindex for word in of_name)][-1] for name, of_name in words.items()}
    found = {split for name, split in splits.items() if name not in reasons}
    own = {0, 1} if source.path_option.startswith("training") else {2} & found or {3} & found or found
    others = {name: "of another split" for name, split in splits.items() if split not in own}
    return others | reasons if 1 in splits.values() else reasons


def _listed(names: list[str]) -> str:
    return f"{len(names):,}: {', '.join(names[:4])}" + ", ..." * (len(names) > 4)


def is_splittable(segment: Segment) -> bool:
    return segment.end not in (1, END)


def _rows_are(training: Training, path: Path) -> str:
    """Return the kind of a file's rows: a key of _READERS or, for a text file, training.text_sample_by."""
    if training.dataset == "json":
        with _open(path) as file:
            return "array" if file.read(2**10).removeprefix(BOM).lstrip()[:1] == b"[" else "json"
    return "parquet" if training.dataset == "parquet" else training.text_sample_by


def segment_of(training: Training, path: Path) -> Segment:
    with errors_of(path), open_file(path) as file:
        end = size = path.stat().st_size
        if (rows := _rows_are(training, path)) == "parquet":
            end = _parquet(path).metadata.num_rows
        elif rows == "document":
            end = 1
        elif rows == "array" or _kind(file) in UNPACKED:
            end = END
    return Segment(str(path), 0, end, size)


def read_rows(training: Training, segment: Segment, columns: Sequence[str]) -> Iterator[Row]:
    """Yield the rows of a segment. Raises ConfigError for an invalid row, TrainingError for a disk or network error."""
    path = Path(segment.file)
    with errors_of(path):
        try:
            yield from _READERS.get(_rows_are(training, path), _text_rows)(training, path, segment, columns)
        except BadRowError as error:
            begin, problem = error.args
            raise ConfigError([f"{place(training, segment.file, begin)}: {problem}"]) from None


def place(training: Training, file: str, begin: int) -> str:
    """Return a text that names a row in a message: the file, if any, and the number of the row or line, from 1."""
    if not file:
        return f"row {begin + 1:,}"
    if (rows := _rows_are(training, Path(file))) == "document":
        return file
    if rows in ("parquet", "array"):
        return f"{file}, row {begin + 1:,}"
    with _open(Path(file)) as content:
        return f"{file}, line {_skip(content, begin) + 1:,}"


def _skip(file: BinaryIO, n: int) -> int:
    """Read the first `n` bytes of a file, and return the number of line feeds in these bytes."""
    n_lines = 0
    while n and (chunk := file.read(min(n, 2**24))):
        n, n_lines = n - len(chunk), n_lines + chunk.count(b"\n")
    return n_lines


@contextlib.contextmanager
def errors_of(path: Path) -> Iterator[None]:
    """Turn any exception from reading a file into a ConfigError or TrainingError with a message of one line."""
    try:
        yield
    except (ConfigError, TrainingError, BadRowError):
        raise
    except Exception as error:  # every format raises its own errors
        reason = " ".join(str(error).split()) or type(error).__name__
        problem = f"{path}: cannot be read: {type(error).__name__}: {reason[:300]}"
        raise (TrainingError(problem) if is_transient(error) else ConfigError([problem])) from None


@contextlib.contextmanager
def _open(path: Path) -> Iterator[BinaryIO]:
    """Open a text file, and decompress it if needed. Raises ConfigError with the file's kind if it is no text."""
    with open_file(path) as file, UNPACKED.get(_kind(file), contextlib.nullcontext)(file) as content:
        if kind := _kind(content):
            raise ConfigError([f"{path}: expected text in UTF-8, found {kind}"])
        yield content


def _kind(file: Any) -> str:
    """Return the kind of a file by its first bytes; "" if it may be UTF-8 text."""
    begin = file.peek(512)
    return next((kind for kind, pattern in KINDS.items() if re.match(pattern, begin, re.DOTALL)), "")


def _unpack_zstd(file: BinaryIO) -> BinaryIO:
    import pyarrow  # imported here, since most runs read no zstd

    return io.BufferedReader(pyarrow.CompressedInputStream(file, "zstd"))


UNPACKED = {"gzip": gzip.open, "bzip2": bz2.open, "xz": lzma.open, "zstd": _unpack_zstd}


def _select(training: Training, row: Any, begin: int, end: int, columns: Sequence[str]) -> Row:
    if not isinstance(row, dict):
        raise BadRowError(begin, f"expected a JSON object, found a value of type {type(row).__name__}")
    if not row.keys() >= {*columns}:
        raise BadRowError(begin, no_column(training, row))
    own = columns_in(training, columns, row)
    return Row(begin, end, {column: row[column] for column in own}, row.keys() - own)


def columns_in(training: Training, columns: Sequence[str], names: Collection[str]) -> list[str]:
    """Return the columns of a row to read: `columns`, which must exist, and a conversation's column TOOLS, if any."""
    return [*columns, *({TOOLS}.intersection(names) - {*columns} if training.dataset_format != "text" else ())]


def no_column(training: Training, names: Collection[str]) -> str:
    """Return an error message about the first column that a dataset with columns `names` lacks; "" if it lacks none."""
    for option, column in columns_of(training).items():
        if column not in names:
            return f"no column {show(column)}; it has {', '.join(names) or 'none'} (training.{option})"
    return ""


def _array_rows(training: Training, path: Path, segment: Segment, columns: Sequence[str]) -> Iterator[Row]:
    with _open(path) as file:
        content = file.read(LARGEST_ROW + 1)
    if len(content) > LARGEST_ROW:
        problem = f"{path}: a JSON array of more than {LARGEST_ROW:,} bytes; write it as JSON lines (jq -c '.[]')"
        raise ConfigError([problem])
    rows = json.loads(content.removeprefix(BOM).decode())
    for index in range(segment.begin, min(segment.end, len(rows))):
        yield _select(training, rows[index], index, index + 1, columns)


def rows_at_a_time(n_rows: int, n_bytes: int) -> int:
    return min(max(BYTES_AT_A_TIME * n_rows // max(n_bytes, 1), 1), 256)


def _parquet(path: Path) -> Any:
    import pyarrow.parquet  # imported here, since most runs read no parquet

    return pyarrow.parquet.ParquetFile(path, pre_buffer=False, buffer_size=2**20)  # read a row group in chunks of 1 MiB


def _parquet_rows(training: Training, path: Path, segment: Segment, columns: Sequence[str]) -> Iterator[Row]:
    file = _parquet(path)
    names = file.schema_arrow.names
    if problem := no_column(training, names):
        raise ConfigError([f"{path}: {problem}"])
    columns, row = columns_in(training, columns, names), 0
    for group in range(file.num_row_groups):
        metadata = file.metadata.row_group(group)
        end = row + metadata.num_rows
        if end <= segment.begin or row >= segment.end:
            row = end
            continue
        chunks = [metadata.column(index) for index in range(metadata.num_columns)]
        own = [chunk for chunk in chunks if chunk.path_in_schema.partition(".")[0] in columns]
        rows = rows_at_a_time(metadata.num_rows, sum(chunk.total_uncompressed_size for chunk in own))
        for batch in file.iter_batches(batch_size=rows, row_groups=[group], columns=columns):
            part = range(len(batch))[max(segment.begin - row, 0) : max(segment.end - row, 0)]
            for index, values in enumerate(batch.slice(part.start, len(part)).to_pylist(), row + part.start):
                if any(isinstance(value, str) and len(value) > LARGEST_ROW for value in values.values()):
                    raise BadRowError(index, f"longer than {LARGEST_ROW:,} bytes")
                yield Row(index, index + 1, values, {*names}.difference(columns))
            row += len(batch)
        if row != end:
            break
    if row != file.metadata.num_rows:  # pyarrow silently skips a page whose type is damaged
        problem = f"{path}: says that it has {file.metadata.num_rows:,} rows, and lacks some or has more: it is damaged"
        raise ConfigError([problem])


def _json_rows(training: Training, path: Path, segment: Segment, columns: Sequence[str]) -> Iterator[Row]:
    with _open(path) as file:
        for begin, end, line in _lines(file, segment):
            if line.strip():
                try:
                    row = json.loads(line.decode())
                except ValueError as error:  # invalid UTF-8 or JSON
                    raise BadRowError(begin, f"no JSON: {error}") from None
                except RecursionError:
                    raise BadRowError(begin, "JSON that is nested too deep") from None
                yield _select(training, row, begin, end, columns)


def _text_rows(training: Training, path: Path, segment: Segment, columns: Sequence[str]) -> Iterator[Row]:
    how = training.text_sample_by
    texts_of = {"document": _document, "paragraph": _paragraphs, "line": _lines}[how]
    with _open(path) as file:
        for begin, end, content in texts_of(file, segment):
            if len(content) > LARGEST_ROW:
                problem = f"a {how} of more than {LARGEST_ROW:,} bytes; set training.text_sample_by so that documents "
                raise BadRowError(begin, f"{problem}are shorter")
            try:
                text = content.decode()
            except UnicodeDecodeError as error:
                raise BadRowError(begin, f"no UTF-8: {error}") from None
            if how == "line":
                text = text.removesuffix("\n").removesuffix("\r")
            yield Row(begin, end, {"text": text.replace("\r\n", "\n").replace("\r", "\n")})


def _document(file: BinaryIO, segment: Segment) -> Iterator[tuple[int, int, bytes]]:
    if segment.begin == 0:
        yield 0, 1, file.read(LARGEST_ROW + 1).removeprefix(BOM)


def _lines(file: BinaryIO, segment: Segment) -> Iterator[tuple[int, int, bytes]]:
    """Yield the start and end, in bytes, of each line that begins in a segment, and the line with its line feed."""
    begin = segment.begin
    if begin:
        begin -= 1
        file.seek(begin) if file.seekable() else _skip(file, begin)
        while chunk := file.readline(2**20):  # skip the rest of a line that begins before this segment
            begin += len(chunk)
            if chunk.endswith(b"\n"):
                break
    while begin < segment.end and (line := file.readline(LARGEST_ROW + 1)):
        if len(line) > LARGEST_ROW:
            raise BadRowError(begin, f"longer than {LARGEST_ROW:,} bytes")
        end = begin + len(line)
        yield begin, end, line.removeprefix(BOM) if begin == 0 else line
        begin = end


def _paragraphs(file: BinaryIO, segment: Segment) -> Iterator[tuple[int, int, bytes]]:
    """Yield the start, end and content of each paragraph that begins in a segment. Empty lines separate paragraphs."""
    first = max(segment.begin - 2, 0)  # begin 2 bytes early, to see whether an empty line ends just before the segment
    lines, after_empty = _lines(file, segment._replace(begin=first, end=END)), first == 0
    for is_empty, group in itertools.groupby(lines, key=lambda line: not line[2].rstrip(b"\r\n")):
        if after_empty and not is_empty:
            begin, end, line = next(group)
            if begin >= segment.end:
                return
            paragraph = [line]
            for _, end, line in group:
                paragraph.append(line)
                if end - begin > LARGEST_ROW:
                    break
            if begin >= segment.begin:
                content = b"".join(paragraph)
                yield begin, end, content if len(content) > LARGEST_ROW else content.rstrip(b"\r\n")
        after_empty = True


_READERS = {"parquet": _parquet_rows, "array": _array_rows, "json": _json_rows}  # _text_rows reads all other kinds
