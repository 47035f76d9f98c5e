"""The options that name a dataset, and what makes tokens of one that is not plain text."""

import dataclasses
from typing import Any, Protocol

import numpy as np

from titanlite.config.loader import show
from titanlite.config.schema import FILES, Training
from titanlite.data.token_shards import DType
from titanlite.data.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class Source:
    """Names a dataset by its options: those of the config or, for a validation split, a changed copy."""

    training: Training
    path_option: str = "training.dataset_path"
    """The option that names the path, for messages."""

    @property
    def is_files(self) -> bool:
        return self.training.dataset in FILES

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that a document is made of."""
        options = self.training
        if options.dataset_format == "messages":
            return (options.dataset_messages_key,)
        if options.dataset_format == "prompt_response":
            return (options.dataset_prompt_key, options.dataset_response_key)
        return ("text",) if options.dataset == "text" else (options.dataset_text_key,)

    def __str__(self) -> str:
        """Return the option that names the dataset, with its value, for messages."""
        if self.training.dataset_path:
            return f"{self.path_option} = {show(self.training.dataset_path)}"
        return f"{self.path_option.removesuffix('_path')} = {show(self.training.dataset)}"


class Template(Protocol):
    """Makes documents of the rows of a dataset that is not plain text, and tokens of them: a ChatTemplate."""

    def __init__(self, tokenizer: Tokenizer): ...

    @staticmethod
    def identity_of(tokenizer: Tokenizer) -> str:
        """Return the identity of a tokenizer's template. Raises ConfigError if it has none."""

    def document(self, training: Training, values: dict[str, Any], unread: set[str]) -> list[Any]:
        """Return the documents of a row, by its columns: texts, whose `is_beginning` says whether another of the row
        follows. `unread` gets the names of keys in it that are not read. Raises ValueError if it has none."""

    def encode(self, documents: list[Any], dtype: DType) -> list[np.ndarray]:
        """Return the tokens of documents; those that are not trained on are marked."""
