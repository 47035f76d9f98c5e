"""A folder with a trained model: a checkpoint of a run, or a Hugging Face folder."""

import dataclasses
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from titanlite.checkpoint.export import config_file_of_run, model_options, read_config, value_of_run
from titanlite.checkpoint.initial_weights import step_folders
from titanlite.checkpoint.loading import load_weights
from titanlite.checkpoint.reader import CheckpointReader
from titanlite.config.hf.values import how_to_download, read_json_object, token_ids
from titanlite.config.loader import ConfigError
from titanlite.config.schema import Model
from titanlite.data.open import build_tokenizer
from titanlite.data.tokenizer import Rows, Tokenizer
from titanlite.hf.config_files import model_of
from titanlite.hf.load import EMBEDDING, HF_DTYPES, name_in, tensor_files
from titanlite.hf.names import hf_name
from titanlite.model import Llama


@dataclasses.dataclass(frozen=True)
class ModelFolder:
    """Describes the trained model of a folder. Only `load` reads the weights."""

    path: Path  # path of the Hugging Face folder, or of the checkpoint's step-N folder
    options: Model
    dtype: torch.dtype  # data type of the weights
    is_hugging_face: bool
    config: dict[str, Any]  # content of the run's config.toml; empty if the run has none

    def value(self, section: str, key: str) -> Any:
        """Return a value of the run's config.toml, or None if config.toml lacks the key."""
        return value_of_run(self.config, section, key)

    def tokenizer_path(self, choice: str | None) -> str:
        """Return the path of the tokenizer; "" stands for the byte tokenizer. `choice` is the argument --tokenizer, or
        None. Raises ConfigError if neither `choice` nor the folder names a tokenizer."""
        if choice is not None:
            return "" if choice == "bytes" else choice
        if self.is_hugging_face:
            path = str(self.path) if (self.path / "tokenizer.json").is_file() else None
        else:
            path = self.value("model", "hf_assets_path")
        if not isinstance(path, str):
            source = "tokenizer.json" if self.is_hugging_face else "config.toml of its run"
            problem = f"{self.path}: has no {source}; name the tokenizer with --tokenizer FOLDER"
            raise ConfigError([f"{problem}, or --tokenizer bytes for a model of bytes"])
        return path

    def tokenizer(self, choice: str | None) -> Tokenizer:
        """Return the tokenizer. Raises ConfigError if the tokenizer does not fit the model."""
        advice = "name its own tokenizer with --tokenizer, or train rows for the token first (model.new_tokens)"
        rows = Rows(self.options.vocab_size, str(self.path), advice)
        return build_tokenizer(self.tokenizer_path(choice)).fit(rows)

    def stop_tokens(self, tokenizer: Tokenizer) -> set[int]:
        """Return the tokens that end a text: EOS, and eos_token_id of generation_config.json, often an end of turn."""
        file = self.path / "generation_config.json"
        if not self.is_hugging_face or not file.exists():
            return {tokenizer.eos}
        return {tokenizer.eos, *token_ids(read_json_object(file), "eos_token_id", file)}

    def load(self, model: Llama) -> None:
        """Fill a model's parameters. Every rank must call `load`. If a rank fails, all ranks raise ConfigError."""
        load_weights(self.path, model, self.options)


def open_folder(folder: Path) -> ModelFolder:
    """Return the description of a folder. Raises ConfigError if the folder has no model or a damaged description."""
    if (folder / "config.json").is_file():
        options = model_of(folder)
        return ModelFolder(folder, options, _hf_dtype(folder, options), True, {})
    config = read_config(folder / "config.toml")
    place = value_of_run(config, "checkpoint", "folder")
    try:
        path = step_folders(folder / place if isinstance(place, str) else folder)[-1]
    except ConfigError as error:
        expected = "a Hugging Face folder, a step-N folder, or the folder of a run that has saved a checkpoint"
        _, _, reason = error.problems[0].partition("; ")
        hint = how_to_download(folder) or (reason and f"; {reason}")
        raise ConfigError([f"{folder}: expected {expected}{hint}"]) from None
    config = config or read_config(config_file_of_run(path))
    reader = CheckpointReader(path)
    dtype = reader.dtypes.get(f"model.{EMBEDDING}", torch.float32)  # `load` rejects a checkpoint without embedding
    return ModelFolder(path, model_options(path, reader.state), dtype, False, config)


def _hf_dtype(folder: Path, options: Model) -> torch.dtype:
    """Return the dtype of all weights, read from the embedding; float32 for a damaged file, which `load` rejects."""
    files = tensor_files(folder)
    name = name_in(files, hf_name(EMBEDDING, options))
    try:
        with safe_open(files.get(name), framework="pt") as tensors:
            return getattr(torch, HF_DTYPES.get(tensors.get_slice(name).get_dtype(), "float32"))
    except (SafetensorError, OSError, TypeError, ValueError, RuntimeError):
        return torch.float32
