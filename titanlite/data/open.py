"""From the options of a dataset to its packed sequences."""

from collections.abc import Iterator
from typing import Any

from titanlite.config.loader import ConfigError
from titanlite.config.schema import Training, Validation
from titanlite.data.documents import open_stream
from titanlite.data.loader import Sequences
from titanlite.data.packing import PackedSequences, ValidationSequences
from titanlite.data.source import Source
from titanlite.data.token_cache import open_token_cache
from titanlite.data.token_shards import Split, TokenCache
from titanlite.data.tokenizer import Tokenizer


def open_sequences(
    tokenizer: Tokenizer, training: Training, validation: Validation, *, seed: int, builds_cache: bool
) -> tuple[Sequences, ValidationSequences | None, str]:
    """Open the training split and, where validation is enabled, the validation split. Also return the identity of the
    training data: equal for two runs only if their global indices name the same sequences.

    Epochs are shuffled by `seed`. The rank with `builds_cache`, one per node, builds a missing token cache. Data that
    cannot be read or is too short raises ConfigError.
    """
    options = {"cache_folder": training.cache_folder, "builds_cache": builds_cache}
    splits: dict[str, tuple[Source, TokenCache, Split]] = {}
    content = ""
    for source, fraction, splits_of_cache in token_caches(training, validation):
        cache = open_token_cache(source, tokenizer, fraction, **options)
        content = content or f"{cache.identity}/{tokenizer.bos}/{tokenizer.eos}"  # of the first, for training
        splits |= {name: (source, cache, split) for name, split in splits_of_cache.items()}
    if training.streaming:
        from titanlite.data.streaming import StreamingSequences  # here, since most runs tokenize first

        dataset, content = open_stream(Source(training))
        sequences: Sequences = StreamingSequences(dataset, Source(training), tokenizer, seed=seed)
        order = f"{tokenizer.identity}/seq_len {training.seq_len}/{training.streaming_shards} streaming shards"
        order += f"/seed {seed}/blocks of {training.streaming_shuffle_block}" if training.shuffle else ""
    else:
        _, cache, split = splits["training"]
        order = f"seq_len {training.seq_len}/{f'seed {seed}' if training.shuffle else 'in order'}"
        if training.packing == "best_fit":
            from titanlite.data.best_fit import BestFitSequences  # here, since most runs have no packing tables

            packing = _best_fit(cache, split, training, builds_cache)
            sequences = BestFitSequences(packing, training, seed=seed)
            order += f"/best fit {packing.identity}"
        else:
            sequences = PackedSequences(cache.tokens(split), tokenizer, training, seed=seed)
    if not validation.enable:
        return sequences, None, f"{content}/{order}"
    source, cache, split = splits["validation"]
    if training.packing == "best_fit":
        from titanlite.data.best_fit import BestFitValidation

        validated: ValidationSequences = BestFitValidation(_best_fit(cache, split, training, builds_cache))
    else:
        validated = ValidationSequences(cache.tokens(split), tokenizer, training.seq_len)
    if not validated.n_sequences:
        problem = f"{source}: has no text to validate on"
        if not _validation_source(training, validation):
            problem = f"validation.fraction = {validation.fraction}: selects no document of this dataset; set it "
            problem += "higher, or set validation.dataset_path (files) or validation.dataset_split (hub)"
        raise ConfigError([problem])
    return sequences, validated, f"{content}/{order}"


def _best_fit(cache: TokenCache, split: Split, training: Training, builds_cache: bool) -> Any:
    from titanlite.data.best_fit import open_best_fit

    return open_best_fit(cache, split, training, builds_cache=builds_cache)


def token_caches(training: Training, validation: Validation) -> Iterator[tuple[Source, float, dict[str, Split]]]:
    """Yield the token caches of a run, that of the training documents first: the dataset, the fraction of its documents
    that belongs to its validation split, and the splits of the cache by what they are for."""
    source = _validation_source(training, validation)
    fraction = 0.0 if source else validation.fraction
    if not training.streaming:
        splits: dict[str, Split] = {"training": "train"}
        yield Source(training), fraction, splits if source else {**splits, "validation": "validation"}
    if source and validation.enable:
        yield source, 0.0, {"validation": "train"}


def _validation_source(training: Training, validation: Validation) -> Source | None:
    """Return the dataset that the validation split is read from; None: it is a fraction of the training documents."""
    if validation.dataset_path:
        files = training.model_copy(update={"dataset_path": validation.dataset_path})
        return Source(files, path_option="validation.dataset_path")
    split = "validation" if training.dataset == "c4" else validation.dataset_split
    return Source(training.model_copy(update={"dataset_split": split})) if split else None
