"""The options that name a dataset."""

import dataclasses

from titanlite.config.loader import show
from titanlite.config.schema import FILES, Training


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
