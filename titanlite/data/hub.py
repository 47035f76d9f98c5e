"""Datasets of the Hugging Face hub, read by its library `datasets`."""

import logging
from collections.abc import Iterable, Iterator
from typing import Any

from titanlite.config.errors import TrainingError
from titanlite.config.loader import ConfigError
from titanlite.data.files import Row, Segment, columns_in, no_column, rows_at_a_time
from titanlite.data.source import Source


def read_rows(source: Source, segment: Segment) -> Iterator[Row]:
    """Yield the rows of a segment of a hub dataset, as files.read_rows does for files."""
    dataset = load(source, streaming=False)
    columns = columns_in(source.training, source.columns, dataset.column_names)
    others, dataset = {*dataset.column_names}.difference(columns), dataset.select_columns(columns)
    rows = rows_at_a_time(len(dataset), dataset.data.nbytes)
    batches = dataset.select(range(segment.begin, segment.end)).iter(batch_size=rows)
    values = (row for batch in read(source, batches) for row in zip(*(batch[name] for name in columns), strict=True))
    for index, row in enumerate(values, segment.begin):
        yield Row(index, index + 1, dict(zip(columns, row, strict=True)), others)


def read(source: Source, items: Iterable[Any]) -> Iterator[Any]:
    """Yield the items. Any error becomes a TrainingError (not a ConfigError), since another start may succeed."""
    try:
        yield from items
    except Exception as error:  # formats, file systems and the network raise errors of many types
        raise TrainingError(_problem(source, "cannot be read", error)) from None


def _problem(source: Source, what: str, error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300] or type(error).__name__}"
    problem = f"{source}: {what}: {reason}; without a network, download its files elsewhere and name them with "
    return problem + 'training.dataset_path and training.dataset = "json" or "parquet"'


def load(source: Source, *, streaming: bool) -> Any:
    """Return the dataset of the `datasets` library. Raises ConfigError if it cannot be loaded or lacks a column."""
    import datasets  # imported here, since a run on files needs no hub

    options = source.training
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(logging.CRITICAL)  # the library would also log the errors that it raises
    path, name, split = options.dataset_path, options.dataset_config or None, options.dataset_split
    if options.dataset == "c4":
        path, name = "allenai/c4", "en"
    try:
        dataset = datasets.load_dataset(path=path, name=name, split=split, streaming=streaming)
        names = dataset.column_names or list(next(iter(dataset)))  # some formats tell columns only once a row is read
    except StopIteration:
        raise ConfigError([f"{source}: has no documents"]) from None
    except Exception as error:  # the hub, file systems and formats raise errors of many types
        raise ConfigError([_problem(source, "cannot be loaded", error)]) from None
    if problem := no_column(options, names):
        raise ConfigError([f"{source}: {problem}"])
    return dataset
