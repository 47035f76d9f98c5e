"""Open the tokenizer, the datasets and their packed sequences that a config names."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from titanlite.config.loader import ConfigError, check_all
from titanlite.config.schema import SEEDED, Checkpoint, DatasetOptions, Model, Parallelism, Training, Validation
from titanlite.data.documents import open_stream
from titanlite.data.files import files_of
from titanlite.data.packing import Mixture, PackedSequences, Sequences, SplitSequences, ValidationSequences
from titanlite.data.source import Source
from titanlite.data.token_cache import open_cache, template_of
from titanlite.data.token_shards import Split, TokenCache
from titanlite.data.tokenizer import ByteTokenizer, Rows, Tokenizer


def build_tokenizer(hf_assets_path: str) -> Tokenizer:
    """Return the tokenizer at a path, in a worker process; "" is the byte tokenizer. Raises ConfigError if unusable."""
    if not hf_assets_path:
        return ByteTokenizer()
    from titanlite.config.hf.values import how_to_download  # imported here: bytes need no download
    from titanlite.data.tokenizer_process import TokenizerProcess

    path = Path(os.path.expanduser(hf_assets_path))
    if hint := how_to_download(path):
        raise ConfigError([f"model.hf_assets_path: {path}: no such folder{hint}"])
    return TokenizerProcess(path)


def tokenizer_of_run(model: Model, checkpoint: Checkpoint, parallelism: Parallelism) -> Tokenizer:
    """Return the tokenizer of a resolved config. Raises ConfigError if the model cannot use the tokenizer."""
    tokenizer, degree = build_tokenizer(model.hf_assets_path), parallelism.tensor_parallel_degree
    weights, advice = checkpoint.initial_load_path, ""
    if weights == SEEDED or (Path(weights) / "config.json").is_file():  # a titanlite checkpoint fixes vocab_size
        rows = "" if weights == SEEDED else ' and model.new_tokens = "mean", which adds rows'
        advice = f"set model.vocab_size = {-(-tokenizer.vocab_size // degree) * degree}{rows}, or "
    option = f"model.vocab_size = {model.vocab_size}"
    return tokenizer.fit(Rows(model.vocab_size, option, f"{advice}choose another model.hf_assets_path"))


def check_data(
    model: Model, checkpoint: Checkpoint, parallelism: Parallelism, training: Training, validation: Validation
) -> None:
    """Raise ConfigError with a line for each unusable tokenizer, chat template or file of a dataset."""
    tokenizers: list[Tokenizer] = []  # stays empty if the tokenizer is unusable
    sources = [each.source for each in token_caches(training, validation)]
    sources += [Source(training)] if training.streaming else []

    def check_source(source: Source) -> None:
        with contextlib.redirect_stdout(None):  # hide the file names that files_of prints: the run prints them later
            files_of(source) if source.is_files else None
        for tokenizer in tokenizers if (template := template_of(source.training)) else ():
            tokenizer.call(template.identity_of)

    checks = [functools.partial(check_source, source) for source in sources]
    check_all(lambda: tokenizers.append(tokenizer_of_run(model, checkpoint, parallelism)), *checks)


class CacheOfRun(NamedTuple):
    """A token cache that a run needs: its dataset, and the splits for training and validation."""

    source: Source
    fraction: float  # fraction of the documents that is the validation split
    splits: dict[str, Split]  # split of the cache for each purpose, "training" or "validation"
    name: str = ""  # name of the dataset in a mixture


Caches = list[tuple[CacheOfRun, TokenCache]]


def open_sequences(
    tokenizer: Tokenizer, training: Training, validation: Validation, *, seed: int, builds_cache: bool
) -> tuple[Sequences | Mixture, SplitSequences | None, str]:
    """Open the training split and, if enabled, the validation split. Also return the data's identity: runs with the
    same identity and mixture read the same sequences in the same order, which depends on `seed`. On each node, the rank
    with `builds_cache` builds a missing token cache. Raises ConfigError for unreadable or too short data."""
    options = {"cache_folder": training.cache_folder, "builds_cache": builds_cache}
    needed = token_caches(training, validation)
    caches = [(each, open_cache(each.source, tokenizer, each.fraction, **options)) for each in needed]
    sequences: Sequences | Mixture
    order = f"seq_len {training.seq_len}/{f'seed {seed}' if training.shuffle else 'in order'}"
    if training.streaming:
        from titanlite.techniques.data.streaming import StreamingSequences  # imported here: most runs tokenize first

        dataset, content = open_stream(Source(training))
        sequences = StreamingSequences(dataset, Source(training), tokenizer, seed=seed)
        order = f"{tokenizer.identity}/seq_len {training.seq_len}/{training.streaming_shards} streaming shards"
        order += f"/seed {seed}/blocks of {training.streaming_shuffle_block}" if training.shuffle else ""
    elif training.datasets:
        sequences, content = open_mixture(tokenizer, training, caches, seed=seed), f"mixture/{tokenizer.identity}"
    else:
        _, cache = caches[0]
        sequences, packing = _pack(cache, tokenizer, training, seed=seed)
        content = f"{cache.identity}/{tokenizer.bos}/{tokenizer.eos}{packing}"
    validated = _open_validation(tokenizer, validation, caches) if validation.enable else None
    return sequences, validated, f"{content}/{order}"


def _pack(cache: TokenCache, tokenizer: Tokenizer, training: Training, *, seed: int) -> tuple[PackedSequences, str]:
    """Return the packed sequences of a cache's training split, and the packing's part of the data's identity."""
    if training.packing == "concatenate":
        return PackedSequences(cache.tokens("train"), tokenizer, training, seed=seed), ""
    from titanlite.techniques.data.best_fit import BestFitSequences, open_best_fit  # imported here: few runs use it

    packing = open_best_fit(cache, "train", training, builds_cache=cache.is_builder)
    return BestFitSequences(packing, training, seed=seed), f"/best fit {packing.identity}"


def pack_once(cache: TokenCache, split: Split, tokenizer: Tokenizer, training: Training) -> SplitSequences:
    """Return the packed sequences of a split that is read once and in order."""
    if training.packing == "concatenate":
        return ValidationSequences(cache.tokens(split), tokenizer, training.seq_len)
    from titanlite.techniques.data.best_fit import open_best_fit

    return open_best_fit(cache, split, training, builds_cache=cache.is_builder)


def token_caches(training: Training, validation: Validation) -> Iterator[CacheOfRun]:
    """Yield the token caches of a run; the caches with training documents come first."""
    datasets = {} if training.datasets else {"": Source(training)}
    for number, each in enumerate(training.datasets):  # each dataset gets the options of a run on this dataset alone
        options = {key: getattr(each, key) for key in DatasetOptions.model_fields}
        path_option = f"training.datasets.{number}.dataset_path"
        datasets[each.name] = Source(training).changed(path_option, **options, datasets=[])
    first = next(iter(datasets.values()))
    named = {key: getattr(validation, key) for key in ("dataset_path", "dataset_split") if getattr(validation, key)}
    for_all = first.changed("validation.dataset_path" if validation.dataset_path else "", **named) if named else None
    of_validation = [CacheOfRun(for_all, 0.0, {"validation": "train"})] if for_all else []
    for name, source in datasets.items():
        splits, fraction = dict[str, Split](training="train"), 0.0
        if not for_all and source.training.dataset == "c4":
            own = source.changed(dataset_split="validation")
            of_validation.append(CacheOfRun(own, 0.0, {"validation": "train"}, name))
        elif not for_all:
            splits, fraction = {**splits, "validation": "validation"}, validation.fraction
        if not training.streaming:
            yield CacheOfRun(source, fraction, splits, name)
    if validation.enable:
        yield from of_validation


def open_mixture(tokenizer: Tokenizer, training: Training, caches: Caches, *, seed: int) -> Mixture:
    """Return the training split of a mixture. Raises ConfigError if a dataset has too few tokens for a sequence."""
    from titanlite.techniques.data import mixture  # imported here, since most runs have one dataset

    opened = [(each.source.training, cache) for each, cache in caches if "training" in each.splits]
    packed, identities, limits, problems = [], [], [], []
    for number, (options, (own, cache)) in enumerate(zip(training.datasets, opened, strict=True)):
        try:
            sequences, packing = _pack(cache, tokenizer, own, seed=mixture.seed_of(options.name, seed))
        except ConfigError as error:
            problems += [f"training.datasets, {options.name}: {problem}" for problem in error.problems]
            continue
        limits.append(mixture.largest_count(options, sequences.n_sequences, training.seq_len))
        if limits[-1] == 0:
            problem = f"training.datasets.{number}.epochs = {options.epochs}: less than one of the "
            problems.append(f"{problem}{sequences.n_sequences:,} packed sequences of {options.name}; set it higher")
        packed.append(sequences)
        identities.append(cache.identity + packing)
    if problems:
        raise ConfigError(problems)
    shares = mixture.integer_shares(training.datasets, [each.n_sequences for each in packed])
    names = [options.name for options in training.datasets]
    return mixture.MixedSequences(list(map(mixture.Component, names, packed, identities, shares, limits)), seed=seed)


def _open_validation(tokenizer: Tokenizer, validation: Validation, caches: Caches) -> SplitSequences:
    """Return the validation split; for a mixture, it combines all datasets with at least one validation document."""
    opened = [(each.splits["validation"], each.source, cache) for each, cache in caches if "validation" in each.splits]
    packed = (pack_once(cache, split, tokenizer, source.training) for split, source, cache in opened)
    if not (splits := [split for split in packed if split.n_sequences]):
        split, source, _ = opened[0]
        if split == "train":
            raise ConfigError([f"{source}: has no text to validate on"])
        n = max(shard.train_documents for *_, cache in opened for shard in cache.index.shards)
        advice = "train on more documents"
        if n > 1:
            advice = f"set it to {-(-(10**6) // n) / 10**6:g} or higher"
        elif (source.training.dataset, source.training.text_sample_by) == ("text", "document"):
            advice = 'set training.text_sample_by = "paragraph" or "line"'
        problem = f"validation.fraction = {validation.fraction}: selects no document of this dataset; {advice}, or "
        raise ConfigError([problem + "set validation.dataset_path (files) or validation.dataset_split (hub)"])
    if len(splits) == 1:
        return splits[0]
    from titanlite.techniques.data.mixture import MixedValidation

    return MixedValidation(splits)
