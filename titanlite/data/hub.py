"""Datasets of the Hugging Face hub, by its `datasets` library.

To add one that needs more than a path, add its name to `config.schema.Training.dataset` and its case to `_arguments`
(docs/data.md).
"""

import logging
from collections.abc import Iterable, Iterator
from typing import Any

from titanlite.config.errors import TrainingError
from titanlite.config.loader import ConfigError
from titanlite.config.schema import Training
from titanlite.data.files import Row, Segment, columns_in, no_column, rows_at_a_time
from titanlite.data.source import Source


def read_rows(source: Source, segment: Segment) -> Iterator[Row]:
    dataset = load(source, streaming=False)
    columns = columns_in(source.training, source.columns, dataset.column_names)
    others, dataset = {*dataset.column_names}.difference(columns), dataset.select_columns(columns)
    rows = rows_at_a_time(len(dataset), dataset.data.nbytes)
    batches = dataset.select(range(segment.begin, segment.end)).iter(batch_size=rows)
    index = segment.begin
    for batch in read(source, batches):
        for values in zip(*(batch[column] for column in columns), strict=True):
            yield Row(index, index + 1, dict(zip(columns, values, strict=True)), others)
            index += 1


def read(source: Source, items: Iterable[Any]) -> Iterator[Any]:
    """Yield the items, and raise what reading them raises as a TrainingError with a message of one line: the dataset
    was found, and another start may succeed."""
    try:
        yield from items
    except Exception as error:  # every format, the file system and the network raise their own
        raise TrainingError(_problem(source, "cannot be read", error)) from None


def _problem(source: Source, what: str, error: BaseException) -> str:
    """Return the line that says what is wrong with a dataset of the hub, with the error that has the reason; `datasets`
    and clients of the network wrap it."""
    while error.__cause__ is not None:
        error = error.__cause__
    reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300] or type(error).__name__}"
    problem = f"{source}: {what}: {reason}; without a network, download its files elsewhere and name them with "
    return problem + 'training.dataset_path and training.dataset = "json" or "parquet"'


def load(source: Source, *, streaming: bool) -> Any:
    """Return a dataset of the `datasets` library."""
    import datasets  # here, since a run on files does not need it

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(logging.CRITICAL)  # it logs the errors that it also raises
    try:
        dataset = datasets.load_dataset(**_arguments(source.training), streaming=streaming)
        names = dataset.column_names or list(next(iter(dataset)))  # some formats know them from the first item
    except StopIteration:
        raise ConfigError([f"{source}: has no documents"]) from None
    except Exception as error:  # the hub, the file system and every format raise their own
        raise ConfigError([_problem(source, "cannot be loaded", error)]) from None
    for column in source.columns:
        if column not in names:
            raise ConfigError([f"{source}: {no_column(source.training, column, names)}"])
    return dataset


def _arguments(options: Training) -> dict[str, Any]:
    """Return the arguments of datasets.load_dataset for a dataset on the Hugging Face hub."""
    if options.dataset == "c4":
        return {"path": "allenai/c4", "name": "en", "split": options.dataset_split}
    return {"path": options.dataset_path, "name": options.dataset_config or None, "split": options.dataset_split}
