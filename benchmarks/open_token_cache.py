"""Measure how long a token cache of a terabyte takes to open, and how fast and in how much memory it is read.

    python benchmarks/open_token_cache.py [--terabytes 1] [--sequences 20000] [--folder FOLDER]

The cache is made up: its shards are sparse files of zeros of 128 MB with their checksums, so that they take little
space on the disk. The first line is the time to make it. Then

    opened       as the rank does that builds caches: tokens.json, and the size and the owner of every shard
    read         packed sequences of 2,048 tokens in their shuffled order, as one rank reads them with their checksums
                 verified; zeros come from memory, so this is the work of the CPU alone
    memory       resident memory of the process before it opened the cache, then, and after it has read

The peak is what one rank needs, whatever the size of the cache.
"""

import argparse
import os
import platform
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil
import xxhash

from titanlite.config.schema import Training
from titanlite.data import shard_files, token_shards
from titanlite.data.packing import PackedSequences
from titanlite.data.token_cache import _complete_cache
from titanlite.data.token_shards import CHECKSUM_BLOCK, HEADER, Index, Shard, shard_name
from titanlite.data.tokenizer import ByteTokenizer
from titanlite.reliability.files import checksum

TOKENS = 2**26  # of a shard


def make(folder: Path, n_shards: int) -> None:
    """Write a token cache of zeros."""
    zeros = xxhash.xxh3_64_intdigest(bytes(CHECKSUM_BLOCK))
    checksums = np.full(TOKENS * 2 // CHECKSUM_BLOCK, zeros, "<u8").tobytes()
    shard = Shard(
        dataset=folder.name,
        train_tokens=TOKENS,
        validation_tokens=0,
        train_documents=0,
        validation_documents=0,
        text_bytes=0,
        train_xxh3_64="0" * 16,
        checksums_xxh3_64=checksum(checksums),
    )
    for number in range(n_shards):
        with (folder / shard_name(number)).open("wb") as file:
            file.write(shard_files.header_of(shard, "uint16"))
            file.truncate(HEADER + TOKENS * 2)
            file.seek(HEADER + TOKENS * 2)
            file.write(checksums)
    Index(dtype="uint16", shards=[shard] * n_shards).publish(folder / token_shards.INDEX)


def resident() -> float:
    return psutil.Process().memory_info().rss / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--terabytes", type=float, default=1)
    parser.add_argument("--sequences", type=int, default=20_000)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder, n_shards = Path(name), round(options.terabytes * 1e12 / (2 * TOKENS))
        begin = time.perf_counter()
        make(folder, n_shards)
        print(f"made      {n_shards:,} shards in {time.perf_counter() - begin:.1f} s")
        memory = [resident()]
        begin = time.perf_counter()
        cache = _complete_cache(folder, "uint16", "folder", verifies=False)
        assert cache
        tokens = cache.tokens("train")
        print(f"opened    {len(tokens):,} tokens in {time.perf_counter() - begin:.3f} s", flush=True)
        memory.append(resident())
        sequences = PackedSequences(tokens, ByteTokenizer(), Training(seq_len=2048), seed=0)
        begin = time.perf_counter()
        for index_of_sequence in range(options.sequences):
            sequences[index_of_sequence]
        seconds = time.perf_counter() - begin
        memory.append(resident())
        rate = options.sequences / seconds
        print(
            f"read      {options.sequences:,} sequences in {seconds:.1f} s: {rate:,.0f}/s, {rate * 2048:,.0f} tokens/s"
        )
        print(f"memory    {' -> '.join(f'{value:.0f}' for value in memory)} MiB")


if __name__ == "__main__":
    main()
