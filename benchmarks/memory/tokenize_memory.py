"""Measure the peak memory of building a token cache of files with the longest rows that are read.

    python -m benchmarks.memory.tokenize_memory [--tokenizers bytes cheap]

Each case is one file and one tokenizer (`cheap` is that of tokenize_speed.py, which splits at white space), in a
process of its own: its resident memory with the tokenizer and without a dataset, and the peak, in MiB.

    line            a JSON line of 64 MiB, ASCII
    line, wide      a JSON line of 64 MiB of UTF-8 with characters of one to three bytes
    array           a JSON array of 60 MiB with short rows
    document        a text file of 64 MiB that is one document
    parquet         500 MB of rows of 5 KB, in one row group
    parquet, long   500 MB of rows of 5 MB, in one row group, and so in one page
"""

import argparse
import json
import os
import platform
import random
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.python_path import with_python_path
from benchmarks.speed.tokenize_speed import make_text, make_tokenizer
from titanlite.config.schema import Training
from titanlite.data.files import LARGEST_ROW
from titanlite.data.open import build_tokenizer, open_cache
from titanlite.data.source import Source

CASES = ("line", "line, wide", "array", "document", "parquet", "parquet, long")


def make(case: str, folder: Path) -> str:
    """Write the file of a case, and return the kind of the dataset."""
    generator = random.Random(0)
    words = [f"{generator.getrandbits(40):x}" for _ in range(5000)]
    kind, _, which = case.partition(", ")
    if kind in ("line", "document"):
        sentence = "été 日本 dolor sit amet " if which == "wide" else "lorem ipsum dolor sit amet "
        text = sentence * ((LARGEST_ROW - 100) // len(sentence.encode()))
        name = "a.jsonl" if kind == "line" else "a.txt"
        (folder / name).write_text(f'{{"text": "{text}"}}\n' if kind == "line" else text)
        return "json" if kind == "line" else "text"
    if kind == "array":
        rows = [{"text": " ".join(generator.choices(words, k=27))} for _ in range(60 * 2**20 // 320)]
        (folder / "a.json").write_text(json.dumps(rows))
        return "json"
    import pyarrow
    import pyarrow.parquet

    n = 5 * 10**6 if which == "long" else 5000
    texts = [" ".join(generator.choices(words, k=n // 11)) for _ in range(5 * 10**8 // n)]
    options = {"row_group_size": 10**9, "use_dictionary": False, "compression": "zstd"}
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), folder / "a.parquet", **options)
    return "parquet"


def work(kind: str, folder: str, assets: str) -> None:
    """Build the token cache, and print the memory before and at the peak."""
    tokenizer = build_tokenizer(assets)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    source = Source(Training(dataset=kind, dataset_path=folder))  # type: ignore[arg-type]
    cache = open_cache(source, tokenizer, 0.0, cache_folder=f"{folder}-cache-{len(assets)}", builds_cache=True)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print(json.dumps({"tokens": len(cache.tokens("train")), "before MiB": before, "peak MiB": peak}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = ["bytes", "cheap"]
    parser.add_argument("--tokenizers", nargs="+", choices=kinds, default=kinds)
    parser.add_argument("--make", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--work", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.make:
        print(make(options.make[0], Path(options.make[1])))
        return
    if options.work:
        work(*options.work)
        return

    def run(*arguments: str) -> str:
        command = [sys.executable, __file__, *arguments]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=with_python_path(os.environ))
        return done.stdout.splitlines()[-1]

    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    with tempfile.TemporaryDirectory() as temporary:
        text, assets = Path(temporary) / "text", Path(temporary) / "assets"
        text.mkdir()
        make_text(text, 24)
        make_tokenizer("cheap", assets, text / "0.jsonl")
        for case in CASES:
            with tempfile.TemporaryDirectory(dir=temporary) as folder:
                kind = run("--make", case, folder)
                for tokenizer in options.tokenizers:
                    result = run("--work", kind, folder, str(assets) if tokenizer == "cheap" else "")
                    print(json.dumps({"case": case, "tokenizer": tokenizer, **json.loads(result)}), flush=True)


if __name__ == "__main__":
    main()
