"""Measure how fast a token cache is built, beside the `tokenizers` library alone and `datasets.map`.

    python -m benchmarks.speed.tokenize_speed [--megabytes 64] [--rounds 3] [--tokenizers cheap bpe costly]
                                              [--folder FOLDER]
    python -m benchmarks.speed.tokenize_speed --programs titanlite worker --checkout FOLDER [...]  beside another

The text is made of paragraphs of the English prose and the sources that CPython carries, drawn with a fixed seed, as
JSON lines in four files. The tokenizers are trained on some of it: `cheap` splits at white space (WordLevel), `bpe` is
byte-level BPE with 32,000 tokens, as Llama 3 and GPT-2 have, and `costly` the same behind a Unicode normalization and a
regular expression. Each program is a process of its own; in each round all take turns:

    titanlite       open_cache of an empty cache folder: reads, parses, tokenizes, writes, verifies
    worker          titanlite's tokenizer, of 1,000 texts at a time, which come back from its process as in streaming;
                    the seconds are those of the fastest of REPEATS calls
    encode_batch    tokenizers.Tokenizer.encode_batch_fast of 1,000 texts at a time, which are in memory
    datasets.map    load_dataset("json") and map(batched=True, num_proc=the number of cores), which write Arrow files
    datatrove       JsonlReader and DocumentTokenizer on as many workers as cores; left out if it is not installed
                    (pip install datatrove orjson)

Each launch prints a JSON line: seconds (of the work, without imports and the tokenizer's construction), seconds of the
processors (of all that the launch does, and less noisy on a shared machine), peak resident memory in MiB, the largest
sum of a process and its children, and tokens. Then for each tokenizer the medians, and throughput relative to
encode_batch.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import platform
import random
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

import psutil

from benchmarks.python_path import ROOT, with_python_path

N_FILES = 4
PROGRAMS = ["titanlite", "worker", "encode_batch", "datasets.map"]
OF_CHECKOUT, REPEATS = " (checkout)", 5
if importlib.util.find_spec("datatrove"):
    PROGRAMS.append("datatrove")


def make_text(folder: Path, megabytes: int) -> None:
    """Write JSON lines of 1 to 40 paragraphs each."""
    from pydoc_data.topics import topics

    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    texts = [*topics.values(), *(source.read_text(errors="replace") for source in sources)]
    paragraphs = [paragraph for text in texts for paragraph in text.split("\n\n") if paragraph.strip()]
    generator = random.Random(0)
    for number in range(N_FILES):
        with (folder / f"{number}.jsonl").open("w") as file:
            while file.tell() < megabytes * 1e6 / N_FILES:
                document = "\n\n".join(generator.choices(paragraphs, k=generator.randint(1, 40)))
                file.write(json.dumps({"text": document}) + "\n")


def make_tokenizer(kind: str, folder: Path, text: Path) -> None:
    """Train a tokenizer on the beginning of the text and write its tokenizer.json."""
    import tokenizers
    from tokenizers import models, normalizers, pre_tokenizers, trainers

    with text.open() as file:
        texts = [json.loads(next(file))["text"] for _ in range(300)]
    special_tokens = ["<s>", "</s>", "<unk>"]
    if kind == "cheap":
        tokenizer = tokenizers.Tokenizer(models.WordLevel(unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        trainer = trainers.WordLevelTrainer(vocab_size=30_000, special_tokens=special_tokens, show_progress=False)
    else:
        tokenizer = tokenizers.Tokenizer(models.BPE())
        splits = [pre_tokenizers.ByteLevel(add_prefix_space=False)]
        if kind == "costly":
            tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.StripAccents()])
            pattern = tokenizers.Regex(r"\p{N}{1,3}|[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)")
            splits = [pre_tokenizers.Split(pattern, "isolated"), *splits]
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits)
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=32_000, special_tokens=special_tokens, initial_alphabet=alphabet, show_progress=False
        )
    tokenizer.train_from_iterator(texts, trainer)
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))


def work(program: str, text: Path, assets: Path, folder: Path) -> dict[str, float]:
    """Tokenize the text with one program."""
    if program == "titanlite":
        from titanlite.config.schema import Training
        from titanlite.data.open import build_tokenizer, open_cache
        from titanlite.data.source import Source

        own, source = build_tokenizer(str(assets)), Source(Training(dataset="json", dataset_path=str(text)))
        begin = time.perf_counter()
        cache = open_cache(source, own, 0.0, cache_folder=str(folder), builds_cache=True)
        return {"seconds": time.perf_counter() - begin, "tokens": len(cache.tokens("train"))}
    from tokenizers import Tokenizer

    texts = []
    if program in ("worker", "encode_batch"):
        texts = [json.loads(line)["text"] for file in sorted(text.glob("*.jsonl")) for line in file.open()]
    if program == "worker":
        from titanlite.data.open import build_tokenizer
        from titanlite.data.tokenizer import encode_documents

        own, fastest, n_tokens = build_tokenizer(str(assets)), list[float](), 0
        for first in range(0, len(texts), 1000):
            seconds = []
            for _ in range(REPEATS):
                begin = time.perf_counter()
                tokens = encode_documents(own, texts[first : first + 1000])
                seconds.append(time.perf_counter() - begin)
            fastest.append(min(seconds))
            n_tokens += sum(map(len, tokens))
        own.close()
        return {"seconds": sum(fastest), "tokens": n_tokens}
    tokenizer = Tokenizer.from_file(str(assets / "tokenizer.json"))
    if program == "encode_batch":
        begin, n_tokens = time.perf_counter(), 0
        for first in range(0, len(texts), 1000):
            encodings = tokenizer.encode_batch_fast(texts[first : first + 1000], add_special_tokens=False)
            n_tokens += sum(len(encoding) for encoding in encodings) + 2 * len(encodings)
        return {"seconds": time.perf_counter() - begin, "tokens": n_tokens}
    if program == "datatrove":
        return tokenize_with_datatrove(text, assets, folder)
    import datasets

    datasets.disable_progress_bars()

    def encode(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        encodings = tokenizer.encode_batch_fast(batch["text"], add_special_tokens=False)
        return {"tokens": [encoding.ids for encoding in encodings]}

    begin = time.perf_counter()
    files = [str(file) for file in sorted(text.glob("*.jsonl"))]
    rows = datasets.load_dataset("json", data_files=files, split="train", cache_dir=str(folder))
    rows = rows.map(encode, batched=True, num_proc=os.cpu_count(), remove_columns=["text"])
    seconds = time.perf_counter() - begin
    return {"seconds": seconds, "tokens": sum(map(len, rows["tokens"])) + 2 * len(rows)}


def tokenize_with_datatrove(text: Path, assets: Path, folder: Path) -> dict[str, float]:
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.tokens import DocumentTokenizer
    from datatrove.utils.logging import logger

    logger.remove()
    name = str(assets / "tokenizer.json")
    options = {"shuffle_documents": False, "eos_token": "</s>"}
    steps = [JsonlReader(str(text)), DocumentTokenizer(str(folder / "out"), tokenizer_name_or_path=name, **options)]
    begin = time.perf_counter()
    LocalPipelineExecutor(steps, tasks=N_FILES, workers=os.cpu_count(), logging_dir=str(folder / "logs")).run()
    seconds = time.perf_counter() - begin
    sizes = [file.stat().st_size for file in (folder / "out").rglob("*.ds")]
    return {"seconds": seconds, "tokens": sum(sizes) // 2}


def launch(program: str, text: Path, assets: Path, checkout: Path) -> dict[str, float]:
    """Run a program in a process of its own, with its peak memory."""
    folder = Path(tempfile.mkdtemp())
    checkout = checkout if program.endswith(OF_CHECKOUT) else ROOT
    work = program.removesuffix(OF_CHECKOUT)
    command = [sys.executable, __file__, "--work", work, str(text), str(assets), str(folder)]
    environment = with_python_path(os.environ, checkout)
    peak, begin = 0, sum(os.times()[2:4])
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=folder) as process:
        tree = psutil.Process(process.pid)
        while process.poll() is None:
            resident = 0
            for each in [tree, *tree.children(recursive=True)]:
                with contextlib.suppress(psutil.Error):  # it has just ended
                    resident += each.memory_info().rss
            peak = max(peak, resident)
            time.sleep(0.05)
        assert process.stdout
        result = json.loads(process.stdout.read().splitlines()[-1])
    shutil.rmtree(folder)
    return {**result, "processor seconds": sum(os.times()[2:4]) - begin, "peak MiB": peak / 2**20}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    kinds = ["cheap", "bpe", "costly"]
    parser.add_argument("--tokenizers", nargs="+", choices=kinds, default=kinds)
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=PROGRAMS)
    parser.add_argument("--folder", type=Path, help="where the text is made (default: a temporary folder)")
    parser.add_argument("--checkout", type=Path, help="another checkout, whose programs take turns with this one's")
    parser.add_argument("--work", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        program, *paths = options.work
        print(json.dumps(work(program, *map(Path, paths))))
        return
    if options.checkout:
        options.programs = [name + end for name in options.programs for end in ("", OF_CHECKOUT)]
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    with tempfile.TemporaryDirectory(dir=options.folder and options.folder.resolve()) as temporary:
        text = Path(temporary) / "text"
        text.mkdir()
        make_text(text, options.megabytes)
        megabytes = sum(file.stat().st_size for file in text.iterdir()) / 1e6
        for kind in options.tokenizers:
            assets = Path(temporary) / kind
            make_tokenizer(kind, assets, text / "0.jsonl")
            results: dict[str, list[dict[str, float]]] = {program: [] for program in options.programs}
            for round_ in range(options.rounds):
                for program in options.programs:
                    results[program].append(launch(program, text, assets, (options.checkout or ROOT).resolve()))
                    print(json.dumps({"tokenizer": kind, "program": program, "round": round_, **results[program][-1]}))
            medians = {name: statistics.median(each["seconds"] for each in own) for name, own in results.items()}
            for program, seconds in medians.items():
                peak = statistics.median(result["peak MiB"] for result in results[program])
                busy = statistics.median(result["processor seconds"] for result in results[program])
                speed = f"{megabytes / seconds:6.2f} MB/s, {busy:6.2f} s of the processors"
                if "encode_batch" in medians:
                    speed += f", {medians['encode_batch'] / seconds:.3f} of encode_batch"
                print(f"{kind:<8} {program:<20} {seconds:7.2f} s  {speed}, peak {peak:7.1f} MiB", flush=True)


if __name__ == "__main__":
    main()
