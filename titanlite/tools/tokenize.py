"""Tokenize the dataset of a config before a run, on any machine; no GPU is needed.

    titanlite tokenize CONFIG [--section.key=value ...] [--verify] [--show N [--html FILE]]

Builds the missing parts of the token cache in training.cache_folder, for training and for validation. A build that was
stopped continues from where it was stopped. If several machines share the folder, one of them builds and the others
wait. Prints the documents, the tokens, the bytes of text per token, the steps of an epoch and the epochs of the config;
for a mixture also the epochs and the share of each dataset.
--verify also reads every token and compares checksums; damaged parts are built again.
--show N also prints the first N rows that the run trains on, decoded: ⟦trained spans⟧, «special tokens» and the limits
of documents. --html FILE writes these rows as a page, too.

Exit status: 0 the cache is complete, or the command was asked to stop; 2 the config or dataset is wrong; 1 other error.
"""

from __future__ import annotations

import signal
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from titanlite.config import Config, ConfigError, load
from titanlite.config.launch import quantity, resolve, resolve_epochs
from titanlite.launch.arguments import Parser, count, new_file

if TYPE_CHECKING:
    from titanlite.data.token_shards import Split, TokenCache


def main(argv: list[str]) -> int:
    """Run `titanlite tokenize`. Returns the exit status."""
    if not argv or "-h" in argv or "--help" in argv:
        print(__doc__)
        return 0
    from titanlite.launch import process

    def received(number: int) -> None:
        if number != signal.SIGUSR1:
            process.signals.end("asked to stop; run the command again to continue", status=0)

    process.signals.listen(received)
    tokenize(argv)
    return 0


def tokenize(argv: list[str]) -> None:
    """Build the token caches of a config, and print how often the run reads each dataset of a mixture. Raises
    ConfigError and TrainingError as `open_cache` does, and ConfigError if a mixture has too little data for the run."""
    parser = Parser("titanlite tokenize CONFIG [--section.key=value ...]", __doc__)
    parser.add_argument("--verify", action="store_true")
    parser.add_argument("--show", type=count(), metavar="N")
    parser.add_argument("--html", type=new_file, metavar="FILE")
    arguments, config_arguments = parser.parse_known_args(argv)
    if arguments.html and not arguments.show:
        parser.error("--html is an option of --show")
    loaded = load(config_arguments).config
    from titanlite.data.open import open_cache, open_mixture, open_sequences, token_caches, tokenizer_of_run

    # Tokens do not depend on the number of ranks: a config that leaves this number open is resolved for one rank.
    config = resolve(loaded, max(loaded.parallelism.data_parallel_shard_degree, 1), on_cuda=False)
    if loaded.training.global_batch_size == loaded.parallelism.data_parallel_shard_degree == -1:
        ranks = quantity(config.parallelism.world_size, "rank")
        print(f"training.global_batch_size = -1: steps and epochs are those of {ranks}")
    tokenizer = tokenizer_of_run(config.model, config.checkpoint, config.parallelism)
    if config.training.streaming:
        print("training: nothing to do, since training.streaming = true reads the documents while training")
    folder, caches = config.training.cache_folder, []
    options: Any = {"cache_folder": folder, "builds_cache": True, "verifies": arguments.verify}
    for each in token_caches(config.training, config.validation):
        cache = open_cache(each.source, tokenizer, each.fraction, **options)
        caches.append((each, cache))
        dataset = f" of {each.name}" if each.name else ""
        print(f"{cache.folder}: shards: {len(cache.index.shards):,}")
        for name, split in each.splits.items():
            print(f"{name}{dataset}: {describe(config, cache, split)}", flush=True)
    if config.training.datasets:
        mixture = open_mixture(tokenizer, config.training, caches, seed=config.debug.seed)
        steps = resolve_epochs(config, mixture).training.steps
        n = steps * config.training.global_batch_size
        mixture.check(None, n)
        for each, read in zip(mixture.components, mixture.expected_counts(n), strict=True):
            line = f"{each.name}: training.steps = {steps} reads {read / each.sequences.n_sequences:.3g} epochs, "
            print(f"{line}{read / n:.1%} of the run; {each.sequences}", flush=True)
    if arguments.show:
        from titanlite.tools.tokenized_rows import show_rows  # late import: it imports torch

        of_run = config.training, config.validation
        sequences, *_ = open_sequences(tokenizer, *of_run, seed=config.debug.seed, builds_cache=True)
        show_rows(tokenizer, sequences, config.training, arguments.show, arguments.html)


def describe(config: Config, cache: TokenCache, split: Split) -> str:
    """Return a line with a split's documents, tokens and bytes per token; for training also steps and epochs."""
    shards, training = cache.index.shards, config.training
    documents, tokens = (sum(getattr(shard, f"{split}_{what}") for shard in shards) for what in ("documents", "tokens"))
    text_bytes = sum(shard.text_bytes for shard in shards)
    per_token = text_bytes / max(sum(shard.train_tokens + shard.validation_tokens for shard in shards), 1)
    line = f"{documents:,} documents, {tokens:,} tokens, {per_token:.2f} bytes of text per token"
    if split == "validation" or training.datasets:
        return line
    sequences, how = (tokens - 1) // training.seq_len, ""
    if training.packing == "best_fit":
        from titanlite.techniques.data.best_fit import open_best_fit

        packing = open_best_fit(cache, split, training, builds_cache=True)
        sequences, how = packing.n_sequences, f"{packing.summary}; "
    if not sequences:
        problem = f"training.seq_len = {training.seq_len}: the dataset has {line}, too few for a packed sequence"
        raise ConfigError([f"{problem}; set it lower, or train on more text"])
    steps, epoch = config.training.steps, sequences / training.global_batch_size
    if training.epochs:
        steps = resolve_epochs(config, SimpleNamespace(n_sequences=sequences)).training.steps
    line += f"; {how}an epoch has {sequences:,} packed sequences of {training.seq_len:,} tokens, {epoch:,.1f} steps; "
    return line + f"training.steps = {steps} reads {steps / epoch:.3g} epochs"
