"""The rules about datasets, mixtures of them, conversations, streaming and validation."""

import re
from collections import Counter

from titanlite.config import keys
from titanlite.config.loader import Rejections, show, value_of
from titanlite.config.schema import DATASET_OPTIONS, FILES, FORMAT_OPTIONS, Config, DatasetOptions, Training


def dataset_rules(config: Config, changed: set[str], reject: Rejections) -> None:
    """Reject options of a dataset, or of each dataset in a mixture, that need or contradict other options."""
    training, conversations = config.training, list[str]()
    sections = [f"{keys.MIXTURE}.{number}" for number in range(len(training.datasets))] or ["training"]
    for section in sections:
        options, switch, row = value_of(config, section), f"{section}.dataset", f"{section}.dataset_format"
        kind = options.dataset
        if kind in (*FILES, "hub") and not options.dataset_path:
            path = "a name on the Hugging Face hub, as in allenai/c4" if kind == "hub" else "a file, folder or glob"
            reject(f"{section}.dataset_path", f"{switch} = {show(kind)} needs {path}", keys.MIXTURE)
        for readers, key, value in ((DATASET_OPTIONS, switch, kind), (FORMAT_OPTIONS, row, options.dataset_format)):
            for name, values in readers.items():
                if getattr(options, name) != type(options).model_fields[name].default:
                    _require(f"{section}.{name}", key, value, values, reject)
        if options.special_tokens_in_text == "special":
            key = f"{section}.special_tokens_in_text"
            if training.packing != "best_fit":
                reject(keys.PACKING, f'EOS in a text ends no document ({key} = "special"); set "best_fit"', key)
            if not config.model.hf_assets_path:
                reject(key, "bytes have no special tokens; set model.hf_assets_path, or remove it", keys.MIXTURE)
        if options.dataset_format != "text" and kind in DATASET_OPTIONS["dataset_format"]:
            conversations.append(row)
    if conversations:
        _conversation_rules(config, conversations[0], reject)
    switch = f"{sections[0]}.dataset"
    for key, kinds in (("validation.dataset_path", FILES), ("validation.dataset_split", ("hub",))):
        if key in changed:
            _require(key, switch, value_of(config, switch), kinds, reject)
    if training.datasets:
        _mixture_rules(training, changed, reject)
    elif training.change_mixture_on_resume:
        message = f"read only with {keys.MIXTURE}; set that, or remove it"
        reject("training.change_mixture_on_resume", message, keys.MIXTURE)


def _require(key: str, switch: str, value: str, values: tuple[str, ...], reject: Rejections) -> None:
    """Reject option `key` if its value is not read: `value`, the value of option `switch`, is not among `values`."""
    if value not in values:
        message = f"read only when {switch} is {' or '.join(map(show, values))}; set that, or remove it"
        reject(key, message, switch, keys.MIXTURE)


def _conversation_rules(config: Config, key: str, reject: Rejections) -> None:
    """Reject options that do not work with conversations. `key` is the option that asks for conversations."""
    reason = f"conversations ({key} = {show(value_of(config, key))})"
    if config.training.packing != "best_fit":
        reject(keys.PACKING, f'{reason} are not continued in another sequence; set "best_fit"', key)
    if not config.training.document_mask:
        reject("training.document_mask", f"{reason} must not attend to one another; set true", key)
    if not config.model.hf_assets_path:
        reject("model.hf_assets_path", f"{reason} need a tokenizer with a chat template; set its folder", key)


def _mixture_rules(training: Training, changed: set[str], reject: Rejections) -> None:
    for name in DatasetOptions.model_fields:
        if f"training.{name}" in changed:
            reject(f"training.{name}", f"{keys.MIXTURE} names the datasets; remove one of the two", keys.MIXTURE)
    datasets = training.datasets
    names = Counter(dataset.name.lower() for dataset in datasets)  # some file systems ignore the case of names
    share = next((key for key in ("weight", "tokens") if any(getattr(each, key) != -1 for each in datasets)), "")
    for number, dataset in enumerate(datasets):
        table = f"{keys.MIXTURE}.{number}"
        if not re.fullmatch(r"[\w.-]+", dataset.name, re.ASCII):
            reject(f"{table}.name", 'expected a name of letters, digits, "_", "-" and "."', keys.MIXTURE)
        elif names[dataset.name.lower()] > 1:
            reject(f"{table}.name", "expected another name for each dataset", keys.MIXTURE)
        if share == "weight" and dataset.tokens != -1:
            message = "this or another dataset has a weight; set one of the two in all tables"
            reject(f"{table}.tokens", message, keys.MIXTURE)
        elif share and getattr(dataset, share) == -1:
            reject(f"{table}.{share}", "other datasets have one; set it in all tables, or in none", keys.MIXTURE)


def data_rules(config: Config, changed: set[str], reject: Rejections) -> None:
    """Reject options that streaming, validation and generated samples do not support."""
    validation, streaming = config.validation, config.training.streaming and not config.training.datasets
    own_split = all(each.dataset == "c4" for each in config.training.datasets or [config.training])
    has_split = bool(validation.dataset_path or validation.dataset_split or own_split)
    split_keys = (keys.DATASET, keys.MIXTURE, "validation.dataset_path", "validation.dataset_split")
    if streaming:
        _streaming_rules(config, changed, reject)
    elif has_split and keys.FRACTION in changed:
        reject(keys.FRACTION, "the dataset has a validation split of its own; remove it", *split_keys)
    if streaming and validation.enable and not has_split:
        message = "streaming cannot split off validation documents; set validation.dataset_path (files) or "
        message += "validation.dataset_split (hub), or training.streaming = false"
        reject("validation.enable", message, keys.STREAMING, *split_keys)
    elif validation.enable and not has_split and not validation.fraction:
        message = "validation.enable needs documents; set a fraction above 0"
        reject(keys.FRACTION, message, "validation.enable", keys.STREAMING, *split_keys)
    for key in (keys.PIPELINE, keys.CONTEXT) if validation.generate_prompts else ():
        if value_of(config, key) > 1:
            message = f"a rank needs full sequences and all layers, and {key} = {value_of(config, key)}; set []"
            reject(keys.PROMPTS, message, key)
    if "validation.generate_tokens" in changed and not validation.generate_prompts:
        reject("validation.generate_tokens", f"read only with {keys.PROMPTS}; set that, or remove it", keys.PROMPTS)


def _streaming_rules(config: Config, changed: set[str], reject: Rejections) -> None:
    if config.training.dataset == "pydoc_topics":
        reject(keys.STREAMING, "the built-in text is in memory; set false", keys.DATASET)
    if keys.SHUFFLE_BLOCK in changed and not config.training.shuffle:
        reject(keys.SHUFFLE_BLOCK, "read only with training.shuffle = true", "training.shuffle")
    if config.training.packing == "best_fit":
        message = "best-fit packing needs the lengths of all documents, and so the token cache; set false"
        reject(keys.STREAMING, message, keys.PACKING)
    if keys.FRACTION in changed:
        reject(keys.FRACTION, "streaming cannot split off validation documents; remove it", keys.STREAMING)
