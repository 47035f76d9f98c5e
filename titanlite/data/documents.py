"""Read the documents of the built-in text, of text, JSON and parquet files, and of datasets of the Hugging Face hub."""

import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from titanlite.config.loader import ConfigError, show
from titanlite.config.regular_file import open_file
from titanlite.data.files import Row, Segment, errors_of, files_of, place, read_rows, segment_of
from titanlite.data.source import Source

SAMPLE_BYTES, SAMPLES = 2**16, 16  # content_hash reads at most SAMPLES samples of SAMPLE_BYTES from a file
SAMPLES_OF_ALL = 2**14  # approximate number of samples that content_hash reads from all files together
MOST_UNREAD = 1000  # maximum number of unread columns whose names are collected for a message


def open_dataset(source: Source) -> tuple[Iterable[Segment], str]:
    """Return the segments of a dataset that is tokenized before training, and a fingerprint of its documents and their
    order. Raises ConfigError if a file, dataset, split or column is missing, or the hub is unreachable."""
    options = source.training
    segments: Iterable[Segment]
    if source.is_files:
        segments, fingerprint = _open_files(source, with_times=True)
    elif options.dataset == "pydoc_topics":
        texts = _topics()
        segments = [Segment("", 0, len(texts), sum(map(len, texts)))]
        fingerprint = hashlib.sha256("\0".join(texts).encode()).hexdigest()
    else:
        dataset = _hub().load(source, streaming=False)
        segments, fingerprint = [Segment("", 0, len(dataset), dataset.data.nbytes)], dataset._fingerprint
    how = f"{source.columns}/{options.text_sample_by}/{options.special_tokens_in_text}"
    return segments, f"{options.dataset}/{fingerprint}/{how}"


def open_stream(source: Source) -> tuple[list[Segment] | Any, str]:
    """Open a dataset that is tokenized during training. Return its files' segments, or a datasets.IterableDataset if it
    is on the hub, and a fingerprint of its documents and their order. Raises ConfigError as open_dataset does."""
    options = source.training
    if source.is_files:
        segments, content = _open_files(source, with_times=False)
        stream, path = list(segments), ""
    else:
        stream, path, content = _hub().load(source, streaming=True), options.dataset_path, ""
    identity = [options.dataset, path, options.dataset_config, options.dataset_split, source.columns]
    return stream, hashlib.sha256(f"{identity}/{options.text_sample_by}/{content}".encode()).hexdigest()


def read_documents(
    source: Source,
    segment: Segment,
    document_of: Callable[[dict[str, Any]], Any] | None = None,
    unread: set[str] | None = None,
) -> Iterator[tuple[int, Any]]:
    """Yield, for each document of a segment, the position where the next document begins and this document's text.
    `document_of` makes a text from a row's columns, or raises ValueError. `unread` collects the names of columns that
    are not read. Raises ConfigError for a bad row, TrainingError for a disk or network error."""
    column = source.columns[0]
    if source.is_files:
        rows = read_rows(source.training, segment, source.columns)
    elif source.training.dataset == "pydoc_topics":
        texts = enumerate(_topics()[segment.begin : segment.end], segment.begin)
        rows = (Row(index, index + 1, {column: text}) for index, text in texts)
    else:
        rows = _hub().read_rows(source, segment)
    for row in rows:
        if unread is not None and len(unread) < MOST_UNREAD:
            unread.update(row.others)
        try:
            yield row.end, document_of(row.values) if document_of else text_of(row.values[column], column)
        except ValueError as error:
            raise ConfigError([f"{source}: {place(source.training, segment.file, row.begin)}: {error}"]) from None


def text_of(value: Any, column: str) -> str:
    """Return a document's text, with lone surrogates replaced. Raises ValueError for a value that is no text."""
    if not isinstance(value, str):
        what = "no text (null)" if value is None else f"a value of type {type(value).__name__}"
        raise ValueError(f"column {show(column)} holds {what} where a document's text is expected")
    return value if value.isascii() else value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _hub() -> Any:
    from titanlite.data import hub  # imported here, since a run on files needs no hub

    return hub


@functools.cache
def _topics() -> list[str]:
    from pydoc_data.topics import topics

    return [topics[name] for name in sorted(topics)]


def _open_files(source: Source, *, with_times: bool) -> tuple[Iterator[Segment], str]:
    """Return the segments of a dataset's files and their content_hash. A file is opened when its segment is taken."""
    files = files_of(source)
    readable: Iterable[Path] = files
    if source.training.dataset == "parquet":
        from titanlite.data.worker_process import readable_footers  # imported here: only Parquet files need it

        readable = readable_footers(files)
    return (segment_of(source.training, file) for file in readable), content_hash(files, with_times=with_times)


def content_hash(files: Sequence[Path], *, with_times: bool) -> str:
    """Return a hash of files' contents and order, but not of their paths. A large file is hashed by its size and evenly
    spaced samples. Modification times, which differ between copies, are included only if `with_times` is true."""
    content = hashlib.sha256()
    samples = min(SAMPLES, max(SAMPLES_OF_ALL // len(files), 2))
    for path in files:
        with errors_of(path), open_file(path) as file:
            status = path.stat()
            content.update(f"{status.st_size}/{status.st_mtime_ns if with_times else ''}/".encode())
            for sample in range(samples):
                file.seek(max(status.st_size - SAMPLE_BYTES, 0) * sample // (samples - 1))
                content.update(file.read(SAMPLE_BYTES))
    return content.hexdigest()
