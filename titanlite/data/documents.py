"""Datasets as documents of text: the built-in text, text, JSON lines and parquet files, Hugging Face datasets.

To add one, add its name to `config.schema.Training.dataset` and its case to `_hub_arguments` (see docs/data.md).
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
from titanlite.config.schema import Training
from titanlite.errors import TrainingError
from titanlite.reliability.files import is_transient

# Suffixes of the files that are read from a folder, by dataset
SUFFIXES = {"text": (".txt",), "json": (".json", ".jsonl", ".json.gz", ".jsonl.gz"), "parquet": (".parquet",)}
SAMPLE_BYTES, SAMPLES = 2**16, 16  # of a large file, for _content_hash


@dataclasses.dataclass(frozen=True)
class Source:
    """Names a dataset by its options: those of the config or, for a validation split, a changed copy."""

    training: Training
    path_option: str = "training.dataset_path"
    """The option that names the path, for messages."""

    @property
    def is_files(self) -> bool:
        return self.training.dataset in FILES

    def __str__(self) -> str:
        """Return the option that names the dataset, with its value, for messages."""
        if self.training.dataset_path:
            return f"{self.path_option} = {show(self.training.dataset_path)}"
        return f"training.dataset = {show(self.training.dataset)}"


@dataclasses.dataclass(frozen=True)
class Documents:
    """The documents of a dataset in a fixed order."""

    fingerprint: str
    """It changes whenever the documents or their order do."""
    batches: Callable[[], Iterator[list[str]]]
    """Starts an iteration over all texts, a list at a time."""
    count: int | None = None
    """Number of documents, where it is known before they are read."""
    source: str = "training.dataset"
    """The option that names the documents, for messages."""


def load_documents(source: Source) -> Documents:
    """Open a dataset to be tokenized before training. Raise ConfigError if there is no such file, dataset, split or
    column, or the Hugging Face hub cannot be reached; the iteration raises it where something cannot be read."""
    if source.training.dataset == "pydoc_topics":
        from pydoc_data.topics import topics

        texts = [topics[name] for name in sorted(topics)]
        fingerprint = hashlib.sha256("\0".join(texts).encode()).hexdigest()
        return Documents(fingerprint, lambda: iter([texts]), len(texts))
    # Files are read in streaming mode, as `datasets` would copy them into its own cache, which trusts their times.
    dataset, column = _load(source, streaming=source.is_files)
    fingerprint = _content_hash(source, with_times=True) if source.is_files else dataset._fingerprint

    def batches() -> Iterator[list[str]]:
        for batch in read_items(source, dataset.select_columns([column]).iter(batch_size=1000)):
            yield [text_of(source, column, value) for value in batch[column]]

    fingerprint = f"{fingerprint}/{column}/{source.training.text_sample_by}"
    return Documents(fingerprint, batches, None if source.is_files else len(dataset), str(source))


def load_stream(source: Source) -> tuple[Any, str, str]:
    """Open a dataset to be tokenized while training: a datasets.IterableDataset, the name of its text column, and the
    identity of its documents and their order. Raise ConfigError as load_documents does."""
    dataset, column = _load(source, streaming=True)
    options = source.training
    path, content = ("", _content_hash(source, with_times=False)) if source.is_files else (options.dataset_path, "")
    identity = [options.dataset, path, options.dataset_config, options.dataset_split, column, options.text_sample_by]
    return dataset, column, hashlib.sha256(f"{identity}/{content}".encode()).hexdigest()


def text_of(source: Source, column: str, value: Any) -> str:
    """Return a document's text. Raise ConfigError if the column holds something else."""
    if not isinstance(value, str):
        what = "no text (null)" if value is None else f"a value of type {type(value).__name__}"
        raise ConfigError([f"{source}: column {show(column)} holds {what} where a document's text is expected"])
    return value


def read_items(source: Source, items: Iterable[Any]) -> Iterator[Any]:
    """Yield the items, and raise what reading them raises with a message of one line: a TrainingError if another start
    may succeed, as with all errors of the Hugging Face hub once the dataset was found, and else a ConfigError."""
    try:
        yield from items
    except Exception as error:  # every file format, the file system and the network raise their own
        root = _root(error)
        problem = _problem(source, "cannot be read", root)
        if is_transient(root) or not source.is_files:
            raise TrainingError(problem) from None
        raise ConfigError([problem]) from None


def _root(error: BaseException) -> BaseException:
    """Return the error that has the reason; `datasets` and clients of the network wrap it."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _problem(source: Source, what: str, error: BaseException) -> str:
    """Return the line that says what is wrong with a dataset, with the error that has the reason."""
    reason = " ".join(str(error).split()) or type(error).__name__
    reason = reason if len(reason) < 300 else f"{reason[:300]} ..."
    problem = f"{source}: {what}: {type(error).__name__}: {reason}"
    if not source.is_files:
        problem += "; without a network, download its files elsewhere and name them with training.dataset_path and "
        problem += 'training.dataset = "json" or "parquet"'
    return problem


def _load(source: Source, *, streaming: bool) -> tuple[Any, str]:
    """Return a dataset of the `datasets` library and the name of its text column."""
    import datasets  # here, since a run on the built-in text does not need it

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(logging.CRITICAL)  # it logs the errors that it also raises
    options = source.training
    column = "text" if options.dataset == "text" else options.dataset_text_key
    if source.is_files:
        files = [glob.escape(str(file)) for file in _files(source)]  # `datasets` takes them for patterns
        arguments: dict[str, Any] = {"path": options.dataset, "data_files": files, "split": "train"}
        if options.dataset == "text":
            arguments["sample_by"] = options.text_sample_by
    else:
        arguments = _hub_arguments(options)
    try:
        dataset = datasets.load_dataset(**arguments, streaming=streaming)
        columns = dataset.column_names or list(next(iter(dataset)))  # some formats know them from the first item
    except StopIteration:
        raise ConfigError([f"{source}: has no documents"]) from None
    except Exception as error:  # the hub, the file system and every format raise their own
        raise ConfigError([_problem(source, "cannot be loaded", _root(error))]) from None
    if column not in columns:
        names = ", ".join(columns)
        raise ConfigError([f"{source}: no column {show(column)}; set training.dataset_text_key to one of {names}"])
    return dataset, column


def _hub_arguments(options: Training) -> dict[str, Any]:
    """Return the arguments of datasets.load_dataset for a dataset on the Hugging Face hub."""
    if options.dataset == "c4":
        return {"path": "allenai/c4", "name": "en", "split": options.dataset_split}
    return {"path": options.dataset_path, "name": options.dataset_config or None, "split": options.dataset_split}


def _files(source: Source) -> list[Path]:
    """Return the files that a path, folder or glob names, sorted so that every machine reads them in the same order."""
    path = Path(source.training.dataset_path).expanduser()
    if path.is_file():
        return [path]
    suffixes = SUFFIXES[source.training.dataset]
    if path.is_dir():
        files = [file for file in path.rglob("*") if file.name.endswith(suffixes)]
    else:
        files = [Path(file) for file in glob.glob(str(path), recursive=True)]
    if not files:
        reason = f"no file in it ends in {' or '.join(suffixes)}" if path.is_dir() else "no such file or folder"
        raise ConfigError([f"{source}: {reason}"])
    return sorted(file for file in files if file.is_file())


def _content_hash(source: Source, *, with_times: bool) -> str:
    """Return a hash of the files' content and order, wherever they are stored: all of a small file, the size and evenly
    spaced samples of a large one. Modification times, which differ between copies, count only `with_times`."""
    content = hashlib.sha256()
    for path in _files(source):
        status = path.stat()
        content.update(f"{status.st_size}/{status.st_mtime_ns if with_times else ''}/".encode())
        with path.open("rb") as file:
            for sample in range(SAMPLES):
                file.seek(max(status.st_size - SAMPLE_BYTES, 0) * sample // (SAMPLES - 1))
                content.update(file.read(SAMPLE_BYTES))
    return content.hexdigest()
