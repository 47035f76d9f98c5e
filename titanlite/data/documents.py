"""Where documents come from: the built-in text, files, the Hugging Face hub.

To add a dataset, add its name to `config.Training.dataset` and its case to `_hub_options` (docs/data.md shows one).
"""

import dataclasses
import glob
import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from titanlite.config.loader import ConfigError, show
from titanlite.config.rules import FILES

ENDINGS = {"text": (".txt",), "json": (".json", ".jsonl", ".json.gz", ".jsonl.gz"), "parquet": (".parquet",)}
"""What is taken from a folder."""

BLOCK, BLOCKS = 2**16, 16
"""Bytes and number of the samples that tell a large file from another; see _content."""


@dataclasses.dataclass(frozen=True)
class Documents:
    """Documents in a fixed order.

    Attributes:
        fingerprint: changes whenever the documents or their order do.
        batches: starts an iteration over all texts, a list at a time.
    """

    fingerprint: str
    batches: Callable[[], Iterator[list[str]]]


@dataclasses.dataclass(frozen=True)
class Source:
    """A dataset as the options name it.

    Attributes:
        key: the option that names the path, for messages.
        The others are options of the same name.
    """

    dataset: str
    dataset_path: str
    dataset_config: str
    split: str
    text_key: str
    text_sample_by: str
    key: str = "training.dataset_path"


def load_documents(source: Source) -> Documents:
    """Open a dataset that is read whole.

    Raises:
        ConfigError: if there is no such file, dataset, split or column, or the hub cannot be reached; also by the
            iteration, where something cannot be read.
    """
    if source.dataset == "pydoc_topics":
        from pydoc_data.topics import topics

        texts = [topics[name] for name in sorted(topics)]
        return Documents(hashlib.sha256("\0".join(texts).encode()).hexdigest(), lambda: iter([texts]))
    # Files are read as a stream: `datasets` would copy them into a cache of its own, which trusts their times.
    is_files = source.dataset in FILES
    loaded, column = _load(source, streaming=is_files)
    fingerprint = _content(source, with_times=True) if is_files else loaded._fingerprint

    def batches() -> Iterator[list[str]]:
        with_errors = reading(source, loaded.select_columns([column]).iter(batch_size=1000))
        return ([text_of(source, column, value) for value in batch[column]] for batch in with_errors)

    return Documents(f"{fingerprint}/{column}/{source.text_sample_by}", batches)


def load_stream(source: Source) -> tuple[Any, str, str]:
    """Open a dataset that is read while training: (datasets.IterableDataset, name of the text column, identity of its
    documents and their order).

    Raises:
        ConfigError: as load_documents.
    """
    loaded, column = _load(source, streaming=True)
    named = dataclasses.replace(source, dataset_path="") if source.dataset in FILES else source
    content = _content(source, with_times=False) if source.dataset in FILES else ""
    return loaded, column, hashlib.sha256(f"{named}/{content}".encode()).hexdigest()


def text_of(source: Source, column: str, value: Any) -> str:
    """A document's text, or a ConfigError if the column holds something else."""
    if not isinstance(value, str):
        what = "no text (null)" if value is None else f"a value of type {type(value).__name__}"
        raise ConfigError([f"{_where(source)}: column {show(column)} holds {what} where a document's text is expected"])
    return value


def _where(source: Source) -> str:
    if source.dataset_path:
        return f"{source.key} = {show(source.dataset_path)}"
    return f"training.dataset = {show(source.dataset)}"


def _load(source: Source, *, streaming: bool) -> tuple[Any, str]:
    import datasets  # here, since a run on the built-in text does not need it

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(logging.CRITICAL)  # it logs what it also raises
    if source.dataset in FILES:
        files = [glob.escape(str(file)) for file in _files(source)]  # `datasets` takes them for patterns
        options: dict[str, Any] = {"path": source.dataset, "data_files": files, "split": "train"}
        if source.dataset == "text":
            options["sample_by"] = source.text_sample_by
        column = "text" if source.dataset == "text" else source.text_key
    else:
        options, column = _hub_options(source), source.text_key
    try:
        loaded = datasets.load_dataset(**options, streaming=streaming)
        columns = loaded.column_names or list(next(iter(loaded)))  # a stream may learn them from its first row
    except StopIteration:
        raise ConfigError([f"{_where(source)}: has no documents"]) from None
    except Exception as error:  # the hub, the file system and every format raise their own
        raise _refused(source, "cannot be loaded", error) from None
    if column not in columns:
        names = ", ".join(columns)
        raise ConfigError(
            [f"{_where(source)}: no column {show(column)}; set training.dataset_text_key to one of {names}"]
        )
    return loaded, column


def _hub_options(source: Source) -> dict[str, Any]:
    """Arguments of datasets.load_dataset for what is on the Hugging Face hub."""
    if source.dataset == "c4":
        return {"path": "allenai/c4", "name": "en", "split": source.split}
    return {"path": source.dataset_path, "name": source.dataset_config or None, "split": source.split}


def reading(source: Source, rows: Iterable[Any]) -> Iterator[Any]:
    """Pass on what is read; turn what a file or the network raises into one line."""
    try:
        yield from rows
    except Exception as error:
        raise _refused(source, "cannot be read", error) from None


def _refused(source: Source, what: str, error: BaseException) -> ConfigError:
    while error.__cause__ is not None:  # `datasets` wraps what says something
        error = error.__cause__
    reason = " ".join(str(error).split()) or type(error).__name__
    reason = reason if len(reason) < 300 else f"{reason[:300]} ..."
    hint = (
        ""
        if source.dataset in FILES
        else '; without a network, download its files elsewhere and name them with training.dataset = "json" or '
        '"parquet" and training.dataset_path'
    )
    return ConfigError([f"{_where(source)}: {what}: {type(error).__name__}: {reason}{hint}"])


def _files(source: Source) -> list[Path]:
    """The files that a path, folder or glob names, sorted so that their order is the same on every machine."""
    path = Path(source.dataset_path).expanduser()
    if path.is_file():
        return [path]
    endings = ENDINGS[source.dataset]
    if path.is_dir():
        found = [file for file in path.rglob("*") if file.name.endswith(endings)]
    else:
        found = [Path(file) for file in glob.glob(str(path), recursive=True)]
    if not found:
        wanted = f"no file in it ends in {' or '.join(endings)}" if path.is_dir() else "no such file or folder"
        raise ConfigError([f"{_where(source)}: {wanted}"])
    return sorted(file for file in found if file.is_file())


def _content(source: Source, *, with_times: bool) -> str:
    """A hash of the files' content and order, wherever they are: of small files all of it, of large ones their size and
    evenly spaced samples.

    Args:
        with_times: also of the times of change, which differ between copies.
    """
    content = hashlib.sha256()
    for file in _files(source):
        status = file.stat()
        content.update(f"{status.st_size}/{status.st_mtime_ns if with_times else ''}/".encode())
        with file.open("rb") as opened:
            for block in range(BLOCKS):
                opened.seek(max(status.st_size - BLOCK, 0) * block // (BLOCKS - 1))
                content.update(opened.read(BLOCK))
    return content.hexdigest()
