"""From the options of datasets to their packed sequences."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist

from titanlite.config.loader import ConfigError, check_all
from titanlite.config.schema import SEEDED, Checkpoint, DatasetOptions, Model, Parallelism, Training, Validation
from titanlite.data.documents import open_stream
from titanlite.data.files import files_of
from titanlite.data.packing import Mixture, PackedSequences, Sequences, SplitSequences, ValidationSequences
from titanlite.data.source import Source
from titanlite.data.token_cache import open_token_cache
from titanlite.data.token_shards import Split, TokenCache
from titanlite.data.tokenizer import ByteTokenizer, Rows, Tokenizer
from titanlite.launch.progress import mark

if TYPE_CHECKING:
    from titanlite.techniques.data.best_fit import BestFitSequences
    from titanlite.techniques.data.mixture import MixedSequences


def build_tokenizer(hf_assets_path: str) -> Tokenizer:
    """Return the tokenizer of a path, in a process of its own, or that of bytes for an empty one. Raise ConfigError if
    it cannot be used."""
    if not hf_assets_path:
        return ByteTokenizer()
    from titanlite.config.hf.values import how_to_download  # here, since a run on bytes needs neither
    from titanlite.data.worker import TokenizerProcess

    path = Path(hf_assets_path).expanduser()
    if hint := how_to_download(path):
        raise ConfigError([f"model.hf_assets_path: {path}: no such folder{hint}"])
    return TokenizerProcess(path)


def tokenizer_of_run(model: Model, checkpoint: Checkpoint, parallelism: Parallelism) -> Tokenizer:
    """Return the tokenizer of a resolved config. Raises ConfigError if it cannot be used with the model."""
    tokenizer, degree = build_tokenizer(model.hf_assets_path), parallelism.tensor_parallel_degree
    weights, advice = checkpoint.initial_load_path, ""
    if weights == SEEDED or (Path(weights) / "config.json").is_file():  # else a checkpoint, which has no other size
        advice = f"set model.vocab_size = {-(-tokenizer.vocab_size // degree) * degree}"
        advice += "" if weights == SEEDED else ' and model.new_tokens = "mean", which adds rows'
        advice += ", or "
    option = f"model.vocab_size = {model.vocab_size}"
    return tokenizer.fit(Rows(model.vocab_size, option, f"{advice}choose another model.hf_assets_path"))


def check_data(
    model: Model, checkpoint: Checkpoint, parallelism: Parallelism, training: Training, validation: Validation
) -> None:
    """Raise ConfigError with a line for each reason that a run cannot use its tokenizer, its chat template, or the
    files of its datasets. Names of datasets on the hub are not looked up."""
    tokenizer: Any = None
    sources = [each.source for each in token_caches(training, validation)]
    sources += [Source(training)] if training.streaming else []

    def check_tokenizer() -> None:
        nonlocal tokenizer
        tokenizer = tokenizer_of_run(model, checkpoint, parallelism)

    def check_source(source: Source) -> None:
        with contextlib.redirect_stdout(None):  # a run names the files, once
            files_of(source) if source.is_files else None
        if tokenizer and (template := template_of(source.training)):
            tokenizer.call(template.identity_of)

    check_all(check_tokenizer, *(functools.partial(check_source, source) for source in sources))


class CacheOfRun(NamedTuple):
    """A token cache that a run needs: its dataset, and what for."""

    source: Source
    fraction: float
    """Fraction of the documents that belongs to the validation split."""
    splits: dict[str, Split]
    """The cache's splits by what they are for, "training" or "validation"."""
    name: str = ""
    """Name of the dataset in a mixture."""


Caches = list[tuple[CacheOfRun, TokenCache]]


def open_sequences(
    tokenizer: Tokenizer, training: Training, validation: Validation, *, seed: int, builds_cache: bool
) -> tuple[Sequences | Mixture, SplitSequences | None, str]:
    """Open the training split and, where validation is enabled, the validation split. Also return the identity of the
    training data: equal for two runs only if their global indices name the same sequences (of two mixtures, if their
    own identities are equal too).

    Epochs are shuffled by `seed`. The rank with `builds_cache`, one per node, builds a missing token cache. Data that
    cannot be read or is too short raises ConfigError.
    """
    options = {"cache_folder": training.cache_folder, "builds_cache": builds_cache}
    needed = token_caches(training, validation)
    caches = [(each, open_cache(each.source, tokenizer, each.fraction, **options)) for each in needed]
    sequences: Sequences | Mixture
    if training.streaming:
        from titanlite.techniques.data.streaming import StreamingSequences  # here, since most runs tokenize first

        dataset, content = open_stream(Source(training))
        sequences = StreamingSequences(dataset, Source(training), tokenizer, seed=seed)
        order = f"{tokenizer.identity}/seq_len {training.seq_len}/{training.streaming_shards} streaming shards"
        order += f"/seed {seed}/blocks of {training.streaming_shuffle_block}" if training.shuffle else ""
    else:
        order = f"seq_len {training.seq_len}/{f'seed {seed}' if training.shuffle else 'in order'}"
        if training.datasets:
            sequences = open_mixture(tokenizer, training, caches, seed=seed, builds_cache=builds_cache)
            content = f"mixture/{tokenizer.identity}"
        else:
            cache = caches[0][1]
            sequences, packing = _pack(cache, tokenizer, training, seed=seed, builds_cache=builds_cache)
            content = f"{cache.identity}/{tokenizer.bos}/{tokenizer.eos}{packing}"
    validated = None
    if validation.enable:
        validated = _open_validation(tokenizer, validation, caches, builds_cache=builds_cache)
    return sequences, validated, f"{content}/{order}"


def _pack(
    cache: TokenCache, tokenizer: Tokenizer, training: Training, *, seed: int, builds_cache: bool
) -> tuple[PackedSequences | BestFitSequences, str]:
    """Return the packed sequences of a cache's training split, and what identifies their packing beside the cache."""
    if training.packing == "concatenate":
        return PackedSequences(cache.tokens("train"), tokenizer, training, seed=seed), ""
    from titanlite.techniques.data.best_fit import BestFitSequences, open_best_fit  # here, since most runs concatenate

    packing = open_best_fit(cache, "train", training, builds_cache=builds_cache)
    return BestFitSequences(packing, training, seed=seed), f"/best fit {packing.identity}"


def pack_once(
    cache: TokenCache, split: Split, tokenizer: Tokenizer, training: Training, *, builds_cache: bool
) -> SplitSequences:
    """Return the packed sequences of a split that is read once, in order."""
    if training.packing == "concatenate":
        return ValidationSequences(cache.tokens(split), tokenizer, training.seq_len)
    from titanlite.techniques.data.best_fit import BestFitValidation, open_best_fit

    return BestFitValidation(open_best_fit(cache, split, training, builds_cache=builds_cache))


def open_cache(source: Source, tokenizer: Tokenizer, fraction: float, **options: Any) -> TokenCache:
    """Return the token cache of a dataset of any format. The options are those of open_token_cache."""
    return open_token_cache(source, tokenizer, fraction, template=template_of(source.training), **options)


def template_of(training: Training) -> Any:
    """Return what makes documents of a dataset's rows; None: they are text."""
    if training.dataset_format == "text":
        return None
    from titanlite.techniques.data.chat_template import ChatTemplate  # here, since text needs none

    return ChatTemplate


def token_caches(training: Training, validation: Validation) -> Iterator[CacheOfRun]:
    """Yield the token caches of a run, those of the training documents first."""
    datasets = {"": Source(training)}
    if training.datasets:
        datasets = {each.name: _dataset_of_mixture(training, i) for i, each in enumerate(training.datasets)}
    for_all = _validation_source(next(iter(datasets.values())), validation)
    of_validation = [CacheOfRun(for_all, 0.0, {"validation": "train"})] if for_all else []
    for name, source in datasets.items():
        splits, fraction = dict[str, Split](training="train"), 0.0
        if not for_all and source.training.dataset == "c4":
            own = source.training.model_copy(update={"dataset_split": "validation"})
            own_source = dataclasses.replace(source, training=own)
            of_validation.append(CacheOfRun(own_source, 0.0, {"validation": "train"}, name))
        elif not for_all:
            splits, fraction = {**splits, "validation": "validation"}, validation.fraction
        if not training.streaming:
            yield CacheOfRun(source, fraction, splits, name)
    if validation.enable:
        yield from of_validation


def _dataset_of_mixture(training: Training, number: int) -> Source:
    """Return a dataset of a mixture with the options of a run that has no other."""
    options = {key: getattr(training.datasets[number], key) for key in DatasetOptions.model_fields}
    alone = training.model_copy(update={**options, "datasets": []})
    return Source(alone, path_option=f"training.datasets.{number}.dataset_path")


def _validation_source(source: Source, validation: Validation) -> Source | None:
    """Return the dataset of the same kind that [validation] names; None: it names none."""
    if validation.dataset_path:
        files = source.training.model_copy(update={"dataset_path": validation.dataset_path})
        return Source(files, path_option="validation.dataset_path")
    if validation.dataset_split:
        split = source.training.model_copy(update={"dataset_split": validation.dataset_split})
        return dataclasses.replace(source, training=split)
    return None


def open_mixture(
    tokenizer: Tokenizer, training: Training, caches: Caches, *, seed: int, builds_cache: bool
) -> MixedSequences:
    """Return the training split of a mixture. Raises ConfigError for datasets that are too short, or that may not be
    read for one sequence."""
    from titanlite.techniques.data import mixture  # here, since most runs have one dataset

    opened = [(each.source.training, cache) for each, cache in caches if "training" in each.splits]
    packed, identities, limits, problems = [], [], [], []
    for number, (options, (own, cache)) in enumerate(zip(training.datasets, opened, strict=True)):
        own_seed = mixture.seed_of(options.name, seed)
        try:
            sequences, packing = _pack(cache, tokenizer, own, seed=own_seed, builds_cache=builds_cache)
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
    components = map(mixture.Component, names, packed, identities, shares, limits)
    return mixture.MixedSequences(list(components), seed=seed)


def _open_validation(
    tokenizer: Tokenizer, validation: Validation, caches: Caches, *, builds_cache: bool
) -> SplitSequences:
    """Return the validation split; of a mixture, the splits of all its datasets, but for those without a document."""
    opened = [(each.splits["validation"], each.source, cache) for each, cache in caches if "validation" in each.splits]
    options = {"builds_cache": builds_cache}
    splits = [pack_once(cache, split, tokenizer, source.training, **options) for split, source, cache in opened]
    splits = [split for split in splits if split.n_sequences]
    if not splits:
        split, source, _ = opened[0]
        problem = f"{source}: has no text to validate on"
        if split == "validation":
            n = max(shard.train_documents for *_, cache in opened for shard in cache.index.shards)
            shorter = source.training.dataset == "text" and source.training.text_sample_by == "document"
            advice = 'set training.text_sample_by = "paragraph" or "line"' if shorter else "train on more documents"
            if n > 1:
                advice = f"set it to {-(-(10**6) // n) / 10**6:g} or higher"
            problem = f"validation.fraction = {validation.fraction}: selects no document of this dataset; {advice}, or "
            problem += "set validation.dataset_path (files) or validation.dataset_split (hub)"
        raise ConfigError([problem])
    if len(splits) == 1:
        return splits[0]
    from titanlite.techniques.data.mixture import MixedValidation

    return MixedValidation(splits)


@contextlib.contextmanager
def compared_over_ranks() -> Iterator[Callable[..., None]]:
    """Return a function that every rank must call with the identities of what it has opened in the body. It waits for
    the others, and raises ConfigError if these differ.

    Nodes with token caches of their own may tokenize for hours longer than others. Only the watchdog limits the wait.
    """
    group = dist.new_group(backend="gloo", timeout=timedelta(days=365))

    def compare(*own: str) -> None:
        mark("waiting for the data of other ranks", limited=False)
        identities: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(identities, own, group=group)
        if set(identities) != {own}:
            other = next(rank for rank, name in enumerate(identities) if name != identities[0])
            problem = f"training.dataset_path: rank {other} reads other data than rank 0; give all nodes the same"
            raise ConfigError([problem])

    yield compare
    dist.destroy_process_group(group)
