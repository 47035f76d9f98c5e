"""A class for the options that name a dataset."""

import dataclasses
from typing import Any

from titanlite.config.loader import show
from titanlite.config.schema import FILES, FORMAT_OPTIONS, Training


def columns_of(training: Training) -> dict[str, str]:
    """Return the columns that make a document, by the options that name the columns."""
    options = [name for name, formats in FORMAT_OPTIONS.items() if training.dataset_format in formats]
    return {name: getattr(training, name) for name in options if name.endswith("_key")}


@dataclasses.dataclass(frozen=True)
class Source:
    """The options that name a dataset; for a validation split, a changed copy of the config's options."""

    training: Training
    path_option: str = "training.dataset_path"  # key of the option for the path, for error messages

    @property
    def is_files(self) -> bool:
        return self.training.dataset in FILES

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(columns_of(self.training).values())

    def changed(self, path_option: str = "", **options: Any) -> "Source":
        return Source(self.training.model_copy(update=options), path_option or self.path_option)

    def __str__(self) -> str:
        """Return the option that names the dataset, with its value, for error messages."""
        if self.training.dataset_path:
            return f"{self.path_option} = {show(self.training.dataset_path)}"
        return f"{self.path_option.removesuffix('_path')} = {show(self.training.dataset)}"
