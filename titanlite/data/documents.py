"""Where documents come from: the built-in text, files, the Hugging Face hub.

To add a dataset, add its name to `config.Training.dataset` and its case to `_load` (docs/data.md shows one).
"""

import dataclasses
import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from titanlite.config import FILES, ConfigError

ENDINGS = {"text": "*.txt", "json": "*.json*", "parquet": "*.parquet"}  # taken from a folder


@dataclasses.dataclass(frozen=True)
class Documents:
    """Documents in a fixed order.

    Attributes:
        fingerprint: changes whenever the documents or their order do.
        batches: starts an iteration over all texts, a list at a time.
    """

    fingerprint: str
    batches: Callable[[], Iterator[list[str]]]


def load_documents(
    *,
    dataset: str,
    dataset_path: str,
    dataset_config: str,
    split: str,
    text_key: str,
    text_sample_by: str,
) -> Documents:
    """Open a dataset that is read whole.

    Raises:
        ConfigError: if there is no such file, dataset, split or column, or the hub cannot be reached.
    """
    if dataset == "pydoc_topics":
        from pydoc_data.topics import topics

        texts = [topics[name] for name in sorted(topics)]
        return Documents(hashlib.sha256("\0".join(texts).encode()).hexdigest(), lambda: iter([texts]))
    loaded, column = _load(dataset, dataset_path, dataset_config, split, text_key, text_sample_by, streaming=False)
    return Documents(
        f"{loaded._fingerprint}/{column}",
        lambda: (batch[column] for batch in loaded.select_columns([column]).iter(batch_size=1000)),
    )


def load_stream(
    *,
    dataset: str,
    dataset_path: str,
    dataset_config: str,
    split: str,
    text_key: str,
    text_sample_by: str,
) -> tuple[Any, str]:
    """Open a dataset that is read while training: (datasets.IterableDataset, name of the text column).

    Raises:
        ConfigError: as load_documents.
    """
    return _load(dataset, dataset_path, dataset_config, split, text_key, text_sample_by, streaming=True)


def _load(
    dataset: str, path: str, config: str, split: str, text_key: str, sample_by: str, *, streaming: bool
) -> tuple[Any, str]:
    import datasets  # here, since a run on the built-in text does not need it

    datasets.disable_progress_bars()
    if dataset in FILES:
        options: dict[str, Any] = {"path": dataset, "data_files": _files(dataset, path), "split": "train"}
        if dataset == "text":
            options["sample_by"] = sample_by
        text_key = "text" if dataset == "text" else text_key
    elif dataset == "c4":
        options = {"path": "allenai/c4", "name": "en", "split": split}
    else:
        options = {"path": path, "name": config or None, "split": split}
    where = f"training.dataset = {dataset!r}, {path or options['path']!r}"
    try:
        loaded = datasets.load_dataset(**options, streaming=streaming)
        columns = loaded.column_names or list(next(iter(loaded)))  # a stream may learn them from its first row
    except Exception as error:  # the hub, the file system and every format raise their own
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        hint = (
            ""
            if dataset in FILES
            else (
                "; without a network, download its files elsewhere and name them with training.dataset = "
                '"json" or "parquet" and training.dataset_path'
            )
        )
        raise ConfigError([f"{where}: cannot be loaded: {type(error).__name__}: {reason}{hint}"]) from None
    if text_key not in columns:
        raise ConfigError(
            [f"{where}: no column {text_key!r}; set training.dataset_text_key to one of {', '.join(columns)}"]
        )
    return loaded, text_key


def _files(dataset: str, path: str) -> list[str]:
    """The files that a path, folder or glob names, sorted so that their order is the same on every machine."""
    given = Path(path).expanduser()
    if given.is_file():
        return [str(given)]
    if given.is_dir():
        files = sorted(given.rglob(ENDINGS[dataset]))
    else:
        root = Path(given.anchor or ".")
        files = sorted(root.glob(str(given.relative_to(given.anchor)))) if any(c in path for c in "*?[") else []
    if not files:
        raise ConfigError(
            [f"training.dataset_path = {path!r}: no such file, and no {ENDINGS[dataset]} file matches it"]
        )
    return [str(file) for file in files]
