"""Measure how fast packed sequences are made and read.

    python -m benchmarks.speed.packed_sequences [--megabytes 24] [--rounds 5]

    best fit     the packing of 100,000 documents, as of one shard of a token cache, with log-normal lengths (median 403
                 tokens): seconds, and the share of padding
    mixture      the order of 1024 sequences of 3 and of 100 datasets, which every rank computes: milliseconds
    sequences    2,000 shuffled sequences of 2,048 tokens, from a token cache in the page cache and from a stream of the
                 same files, which is read and tokenized meanwhile (byte-level BPE, the text of tokenize_speed.py):
                 tokens per second of one process

Each figure is the median of some rounds, in which all take turns, with the smallest and the largest.
"""

import argparse
import itertools
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.speed.tokenize_speed import make_text, make_tokenizer
from titanlite.config.schema import Training
from titanlite.data.documents import open_stream
from titanlite.data.open import build_tokenizer, open_cache
from titanlite.data.packing import PackedSequences
from titanlite.data.source import Source
from titanlite.techniques.data.best_fit import pack, split_documents
from titanlite.techniques.data.mixture import MIXTURE_BLOCK, Component, MixedSequences
from titanlite.techniques.data.streaming import StreamingSequences

DOCUMENTS, SEQUENCES, SEQ_LEN = 100_000, 2_000, 2_048


def seconds(function: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def best_fit(seq_len: int, results: dict[str, list[float]]) -> str:
    """Return the line about the padding, and add the seconds to the results."""
    lengths = np.maximum(np.random.default_rng(0).lognormal(6, 1, DOCUMENTS).astype(np.int64), 2)
    begin = time.perf_counter()
    begins, chunks = pack(split_documents(lengths, seq_len, "split"), seq_len)
    name = f"best fit of {DOCUMENTS:,} documents, seq_len {seq_len}, s"
    results.setdefault(name, []).append(time.perf_counter() - begin)
    n_sequences = len(begins) - 1
    padding = 1 - chunks[:, 1].sum() / (n_sequences * (seq_len + 1))
    return f"best fit: {lengths.sum():,} tokens, {n_sequences:,} sequences of {seq_len}, {padding:.4%} padding"


def mixture_block(n: int) -> float:
    """Return the milliseconds of a block of n datasets with different weights."""
    components = [Component(f"{number}", None, "", number + 1, None) for number in range(n)]  # type: ignore[arg-type]
    sequences = MixedSequences(components, seed=0)
    return seconds(lambda: sequences.counts(MIXTURE_BLOCK - 1)) * 1000


def rate(sequences: Any) -> float:
    """Return tokens per second of some sequences."""
    reader = sequences.read(0, 1)
    return SEQUENCES * SEQ_LEN / seconds(lambda: list(itertools.islice(reader, SEQUENCES)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    results: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        text, assets = Path(temporary) / "text", Path(temporary) / "assets"
        text.mkdir()
        make_text(text, options.megabytes)
        make_tokenizer("bpe", assets, text / "0.jsonl")
        tokenizer = build_tokenizer(str(assets))
        training = Training(dataset="json", dataset_path=str(text), seq_len=SEQ_LEN, streaming_shards=1)
        cache = open_cache(
            Source(training), tokenizer, 0.0, cache_folder=str(Path(temporary) / "cache"), builds_cache=True
        )
        for _ in range(options.rounds):
            lines = [best_fit(seq_len, results) for seq_len in (SEQ_LEN, 131_072)]
            for n in (3, 100):
                results.setdefault(f"mixture of {n} datasets, ms for {MIXTURE_BLOCK} sequences", []).append(
                    mixture_block(n)
                )
            packed = PackedSequences(cache.tokens("train"), tokenizer, training, seed=0)
            results.setdefault("token cache, tokens/s", []).append(rate(packed))
            stream = StreamingSequences(open_stream(Source(training))[0], Source(training), tokenizer, seed=0)
            results.setdefault("streaming, tokens/s", []).append(rate(stream))
    for line in lines:
        print(line)
    for name, values in results.items():
        print(f"{name:<52} {statistics.median(values):>12,.3f}   {min(values):,.3f} to {max(values):,.3f}")


if __name__ == "__main__":
    main()
