"""The token cache: shards built once, by one process or its workers, and damage that is found before it is read."""

import functools
import itertools
import json
import os
import pickle
import pwd
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch.distributed as dist
from safetensors.numpy import load_file

from tests.helpers.cases import cases
from tests.helpers.data import BYTES, Code, flat, rejection, some_texts, source, write
from tests.helpers.launches import wait_until
from tests.helpers.lock_holder import Lock
from titanlite.config.errors import TrainingError
from titanlite.config.loader import ConfigError
from titanlite.data import cache_builder, shard_builder, token_cache, token_shards, tokenizer_process
from titanlite.data.documents import open_dataset
from titanlite.data.open import build_tokenizer, open_cache
from titanlite.data.shard_builder import is_validation_document
from titanlite.data.source import Source
from titanlite.data.token_cache import segments_of_shards
from titanlite.data.token_shards import TokenCache
from titanlite.data.tokenizer import ByteTokenizer
from titanlite.data.worker import THREADS, Worker
from titanlite.files import safetensors
from titanlite.launch import progress
from titanlite.launch.folder_lock import FolderLock

FILES = 6


@pytest.fixture(autouse=True)
def _small_and_fast(monkeypatch):
    """Shards of half a file, and locks without a pause."""
    monkeypatch.setattr(cache_builder, "FolderLock", functools.partial(FolderLock, beat_seconds=0.01))
    monkeypatch.setattr(token_cache, "SHARD_BYTES", 700)


def texts_of_files() -> list[list[str]]:
    texts = some_texts(20 * FILES)
    return [texts[number::FILES] for number in range(FILES)]


@pytest.fixture
def dataset(tmp_path) -> Source:
    """Six files of JSON lines of 20 documents."""
    for number, texts in enumerate(texts_of_files()):
        write(tmp_path / "files" / f"{number}.jsonl", texts)
    return source("json", tmp_path / "files")


def cached(
    dataset: Source,
    cache: Path,
    tokenizer: Any = BYTES,
    fraction: float = 0.25,
    builds_cache: bool = True,
    verifies: bool = False,
) -> TokenCache:
    options: Any = {"cache_folder": str(cache), "builds_cache": builds_cache, "verifies": verifies}
    return open_cache(dataset, tokenizer, fraction, **options)


def tokens_of(cache: TokenCache) -> tuple[list[int], list[int]]:
    train, validation = (cache.tokens(split)[:].tolist() for split in ("train", "validation"))
    return train, validation


def folder_of(cache: Path) -> Path:
    (folder,) = cache.iterdir()
    return folder


# What is in it -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fraction", [0.0, 0.001, 0.05, 0.1, 0.29, 1 / 3, 0.5, 0.9])
@pytest.mark.parametrize("shard", [0, 1, 77])
def test_validation_fraction_is_exact_and_even(fraction, shard):
    """Of the first n documents of a shard, n x fraction belong to the validation split, for every n."""
    validation = np.cumsum([is_validation_document(shard, document, fraction) for document in range(5000)])
    assert (np.abs(validation - fraction * np.arange(1, 5001)) < 1).all()


def test_shards_of_few_documents_have_the_validation_fraction_together():
    validation = sum(is_validation_document(shard, 0, 0.05) for shard in range(2000))
    assert validation == pytest.approx(100, abs=2)


@pytest.mark.parametrize("fraction", [0.0, 0.25])
def test_a_token_cache_has_all_documents_in_order(dataset, tmp_path, fraction):
    cache = cached(dataset, tmp_path / "cache", fraction=fraction)
    shards = segments_of_shards(token_cache.open_dataset(dataset)[0])
    assert len(cache.index.shards) == len(shards) > FILES
    documents = [
        [text for segment in shard for _, text in shard_builder.read_documents(dataset, segment)] for shard in shards
    ]
    assert [text for shard in documents for text in shard] == [text for texts in texts_of_files() for text in texts]
    splits: dict[bool, list[str]] = {False: [], True: []}
    for number, texts in enumerate(documents):
        for index, text in enumerate(texts):
            splits[is_validation_document(number, index, fraction)].append(text)
    assert tokens_of(cache) == (flat(splits[False]), flat(splits[True]))
    train = cache.tokens("train")
    assert len(train) == len(flat(splits[False]))
    for begin in range(0, len(train), 37):
        assert train[begin : begin + 100].tolist() == flat(splits[False])[begin : begin + 100]


def test_a_shard_is_a_safetensors_file(dataset, tmp_path):
    """With the number of tokens of each document."""
    cache, folder = cached(dataset, tmp_path / "cache"), folder_of(tmp_path / "cache")
    tokens = []
    for number, shard in enumerate(cache.index.shards):
        tensors = load_file(folder / token_shards.shard_name(number))
        assert set(tensors) == {"train", "validation", "train_documents", "validation_documents", "checksums"}
        assert tensors["train"].dtype == np.uint16
        for split in ("train", "validation"):
            ends = np.cumsum(tensors[f"{split}_documents"])
            assert len(tensors[split]) == (ends[-1] if len(ends) else 0) == getattr(shard, f"{split}_tokens")
            assert (tensors[split][ends - 1] == BYTES.eos).all()
        tokens += tensors["train"].tolist()
    assert tokens == tokens_of(cache)[0]


def test_each_text_tokenizer_and_fraction_has_a_cache_of_its_own(dataset, tmp_path, assets):
    folder = tmp_path / "cache"
    caches = [cached(dataset, folder), cached(dataset, folder, assets.open()), cached(dataset, folder, fraction=0.5)]
    assert len({cache.identity for cache in caches}) == 3
    write(tmp_path / "files" / "6.jsonl", ["one more"])
    caches.append(cached(dataset, folder))
    assert len({cache.folder for cache in caches}) == len(list(folder.iterdir())) == 4


def test_a_file_that_is_read_in_other_ways_has_a_cache_of_its_own(tmp_path):
    file = write(tmp_path / "a.jsonl", ["one\n\ntwo", "three"])
    ways = [
        source("json", file),
        *(source("text", file, text_sample_by=by) for by in ("document", "paragraph", "line")),
    ]
    caches = [cached(way, tmp_path / "cache", fraction=0.0) for way in ways]
    assert len({cache.folder for cache in caches}) == 4
    assert tokens_of(caches[0])[0] == flat(["one\n\ntwo", "three"])
    assert tokens_of(caches[1])[0] == flat([file.read_text()])


def test_a_complete_cache_is_not_built_again(dataset, tmp_path, monkeypatch):
    built = tokens_of(cached(dataset, tmp_path / "cache"))
    monkeypatch.setattr(shard_builder, "read_documents", lambda *arguments: pytest.fail("tokenizes again"))
    assert tokens_of(cached(dataset, tmp_path / "cache")) == built


def test_the_identity_is_of_the_tokens(dataset, tmp_path):
    shutil.copytree(tmp_path / "files", tmp_path / "moved", copy_function=shutil.copyfile)
    moved = source("json", tmp_path / "moved")
    caches = [cached(each, tmp_path / f"cache{number}") for number, each in enumerate((dataset, moved))]
    assert caches[0].folder.name != caches[1].folder.name, "the files have other times"
    assert caches[0].identity == caches[1].identity


# Builds that are stopped, killed, shared -----------------------------------------------------------------------------


def test_a_stopped_build_continues_where_it_was(dataset, tmp_path, monkeypatch):
    """An error in the fourth shard: the first three are not built again, and nothing else is left."""
    real, built = shard_builder.build_shard, []

    def build(path: Path, dtype: Any, number: int, *arguments: Any) -> Any:
        if number == 3 and 3 not in built:
            built.append(number)
            path.write_text("half of it")
            raise KeyboardInterrupt
        built.append(number)
        return real(path, dtype, number, *arguments)

    monkeypatch.setattr(shard_builder, "build_shard", build)
    with pytest.raises(KeyboardInterrupt):
        cached(dataset, tmp_path / "cache")
    names = {f"0000{number}.safetensors" for number in range(3)}
    assert {file.name for file in folder_of(tmp_path / "cache").iterdir()} == names
    assert built == [0, 1, 2, 3]
    interrupted = tokens_of(cached(dataset, tmp_path / "cache"))
    assert sorted(built[4:]) == list(range(3, len(segments_of_shards(token_cache.open_dataset(dataset)[0]))))
    assert interrupted == tokens_of(cached(dataset, tmp_path / "other"))


def test_what_a_killed_build_leaves_is_removed(dataset, tmp_path):
    built = tokens_of(cached(dataset, tmp_path / "cache"))
    folder = folder_of(tmp_path / "cache")
    names = {file.name for file in folder.iterdir()}
    (folder / "00002.safetensors").unlink()
    (folder / "tokens.json").unlink()
    (folder / "00002.0123456789abcdef.tmp").write_text("half of it")
    assert tokens_of(cached(dataset, tmp_path / "cache")) == built
    assert {file.name for file in folder.iterdir()} == names


def test_one_of_two_runs_builds_the_cache(dataset, tmp_path, monkeypatch, capfd):
    """The other one waits, and reads what the first has built."""
    monkeypatch.setattr(progress, "INTERVAL_SECONDS", 0.01)
    real, built = shard_builder.build_shard, []

    def build(path: Path, dtype: Any, number: int, *arguments: Any) -> Any:
        built.append(number)
        time.sleep(0.05)
        return real(path, dtype, number, *arguments)

    monkeypatch.setattr(shard_builder, "build_shard", build)
    with ThreadPoolExecutor(2) as pool:
        first, second = (pool.submit(cached, dataset, tmp_path / "cache") for _ in range(2))
        assert tokens_of(first.result(60)) == tokens_of(second.result(60))
    assert sorted(built) == list(range(len(first.result().index.shards))), "a shard was built twice"
    assert "waiting until another run has built the token cache" in capfd.readouterr().err
    assert not [file for file in folder_of(tmp_path / "cache").iterdir() if "safetensors" not in file.name][1:]


def test_a_run_that_has_lost_the_lock_publishes_nothing_and_waits(dataset, tmp_path, monkeypatch):
    """Another run takes over the lock of one that is suspended. Here it builds nothing, and ends."""
    expected = tokens_of(cached(dataset, tmp_path / "alone"))
    real, published = shard_builder.build_shard, []

    def build(path: Path, dtype: Any, number: int, *arguments: Any) -> Any:
        lock = path.parent / "build.lock"
        if not published:
            taken = json.loads(lock.read_text()) | {"token": "of another", "pid": 2**30}
            lock.write_text(json.dumps(taken))
        published.append([file.name for file in path.parent.glob("*.safetensors")])
        return real(path, dtype, number, *arguments)

    monkeypatch.setattr(shard_builder, "build_shard", build)
    assert tokens_of(cached(dataset, tmp_path / "cache")) == expected
    assert published[:2] == [[], []], "the first shard was published without the lock"


def test_what_another_run_leaves_is_built(dataset, tmp_path, monkeypatch, capfd):
    """It has begun, and dies."""
    monkeypatch.setattr(progress, "INTERVAL_SECONDS", 0.01)
    expected = tokens_of(cached(dataset, tmp_path / "alone"))
    folder = tmp_path / "cache" / folder_of(tmp_path / "alone").name
    folder.mkdir(parents=True)
    options: Any = {"name": "build.lock", "purpose": "", "advice": "", "beat_seconds": 0.01}
    with ThreadPoolExecutor(1) as pool:
        with Lock(folder, lost=lambda message: None, **options):
            building = pool.submit(cached, dataset, tmp_path / "cache")
            wait_until(lambda: "waiting until another run" in capfd.readouterr().err, "the wait", seconds=20)
            assert not (folder / SHARD).exists()
        assert tokens_of(building.result(20)) == expected


def test_worker_processes_build_the_same_cache(dataset, tmp_path, monkeypatch, assets):
    tokenizer = build_tokenizer(str(assets.folder))
    alone = cached(dataset, tmp_path / "alone", tokenizer)
    monkeypatch.setattr(tokenizer_process, "available_cores", lambda: 2 * THREADS)
    started: list[Any] = []
    worker = tokenizer_process.ShardWorker
    monkeypatch.setattr(tokenizer_process, "ShardWorker", lambda path: started.append(worker(path)) or started[-1])
    together = cached(dataset, tmp_path / "together", tokenizer)
    assert together.identity == alone.identity
    assert tokens_of(together) == tokens_of(alone)
    assert len(started) == 2
    assert all(each.process.poll() is not None for each in started), "a worker is left"


@pytest.mark.nightly
def test_errors_of_worker_processes_are_those_of_the_reader(dataset, tmp_path, monkeypatch, assets):
    monkeypatch.setattr(tokenizer_process, "available_cores", lambda: 2 * THREADS)
    bad = tmp_path / "files" / "3.jsonl"
    bad.write_text('{"text": "a"}\n{"text": 5}\n')
    line = rejection(lambda: cached(dataset, tmp_path / "cache", build_tokenizer(str(assets.folder))))
    assert f'{bad}, line 2: column "text" holds a value of type int' in line


def test_a_worker_ends_with_its_parent():
    worker = Worker("")
    assert worker.call(ByteTokenizer.decode, [97]) == "a"
    worker.process.stdin.close()
    assert worker.process.wait(30) == 1


def test_other_ranks_of_a_node_wait_for_the_token_cache(dataset, tmp_path, monkeypatch):
    folder = cached(dataset, tmp_path / "cache").folder
    monkeypatch.setattr(token_cache, "_of_builder", lambda find, builds: find() if builds else folder.name)
    shutil.rmtree(folder)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(cached, dataset, tmp_path / "cache", builds_cache=False)
        time.sleep(0.3)
        assert not waiting.done()
        assert tokens_of(cached(dataset, tmp_path / "cache")) == tokens_of(waiting.result(10))


def build_in_rank(folder: Path, broken: bool) -> str:
    """The identity of the cache, or the problem. Only the first rank reads the dataset."""
    files = folder / "files" if dist.get_rank() == 0 and not broken else folder / "nowhere"
    options = {"cache_folder": str(folder / "cache"), "builds_cache": dist.get_rank() == 0}
    try:
        return open_cache(source("json", files), BYTES, 0.0, **options).identity
    except ConfigError as error:
        return "\n".join(error.problems)


def test_ranks_read_the_cache_that_the_first_of_their_node_builds(ranks, dataset, tmp_path):
    first, second = ranks(2).run(build_in_rank, folder=tmp_path, broken=False)
    assert first == second
    first, second = ranks(2).run(build_in_rank, folder=tmp_path, broken=True)
    assert first == second
    assert first.endswith("no such file or folder")


def test_a_folder_that_cannot_be_written_is_rejected(dataset, tmp_path):
    (tmp_path / "file").write_text("")
    line = rejection(lambda: cached(dataset, tmp_path / "file" / "cache"))
    assert line.startswith(f'training.cache_folder = "{tmp_path}/file/cache": cannot be written: ')


def test_a_full_disk_is_one_line_and_leaves_no_unfinished_file(dataset, tmp_path, monkeypatch):
    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shard_builder, "_blocks", full)
    line = rejection(lambda: cached(dataset, tmp_path / "cache"))
    assert line == f'training.cache_folder = "{tmp_path / "cache"}": cannot be written: No space left on device'
    assert list(folder_of(tmp_path / "cache").iterdir()) == []


def test_a_dataset_without_documents_is_rejected(tmp_path):
    (tmp_path / "a.jsonl").touch()
    line = rejection(lambda: cached(source("json", tmp_path), tmp_path / "cache"))
    assert line == f'training.dataset_path = "{tmp_path}": has no documents'


def test_progress_of_the_token_cache(dataset, tmp_path, monkeypatch, capfd):
    """The rank that builds it reports bytes, tokens and their rate; one of those that wait says so."""
    monkeypatch.setattr(progress, "INTERVAL_SECONDS", 0.01)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    real, may_go_on = shard_builder.build_shard, threading.Event()

    def build(path: Path, dtype: Any, number: int, *arguments: Any) -> Any:
        shard = real(path, dtype, number, *arguments)
        may_go_on.wait(20)
        return shard

    def stderr_with(pattern: str) -> None:
        lines = ""

        def printed() -> bool:
            nonlocal lines
            lines += capfd.readouterr().err
            return re.search(pattern, lines) is not None

        wait_until(printed, pattern, seconds=20)

    folder = cached(dataset, tmp_path / "cache").folder
    shutil.rmtree(folder)
    monkeypatch.setattr(shard_builder, "build_shard", build)
    monkeypatch.setattr(token_cache, "_of_builder", lambda find, builds: find() if builds else folder.name)
    with ThreadPoolExecutor(2) as pool:
        building = pool.submit(cached, dataset, tmp_path / "cache")
        stderr_with(r"building the token cache: [\d,]+ of [\d,]+ bytes, .* left; [\d,]+ tokens, [\d,]+ tokens/s\n")
        waiting = pool.submit(cached, dataset, tmp_path / "cache", builds_cache=False)
        stderr_with("waiting until another rank has built the token cache: 0:00:00\n")
        may_go_on.set()
        assert tokens_of(waiting.result(10)) == tokens_of(building.result(10))


# Damaged and hostile files -------------------------------------------------------------------------------------------


def flip_a_bit(file: Path, at: int) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)


def replace(file: Path, make: Callable[[Path], None]) -> None:
    file.unlink()
    make(file)


def change_index(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change tokens.json, with a correct checksum."""
    content = json.loads((folder / "tokens.json").read_text())
    change(content)
    del content["xxh3_64"]
    checksum = token_shards.checksum(json.dumps(content).encode())
    (folder / "tokens.json").write_text(json.dumps({**content, "xxh3_64": checksum}))


SHARD = "00002.safetensors"
CODE = pickle.dumps(Code())
DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a bit of the tokens": (lambda folder: flip_a_bit(folder / SHARD, 4096), f"{SHARD}: the checksum of the "),
    "a bit of a checksum": (lambda folder: flip_a_bit(folder / SHARD, -1), f"{SHARD}: the checksums are damaged"),
    "cut off": (lambda folder: os.truncate(folder / SHARD, 5000), f"{SHARD} has 5,000 bytes"),
    "longer": (lambda folder: os.truncate(folder / SHARD, 10**6), f"{SHARD} has 1,000,000 bytes"),
    "no shard": (lambda folder: (folder / SHARD).unlink(), f"{SHARD} is missing"),
    "a pipe": (lambda folder: replace(folder / SHARD, os.mkfifo), f"{SHARD} is not a regular file"),
    "a link": (lambda folder: replace(folder / SHARD, lambda file: file.symlink_to("/dev/zero")), "not a regular"),
    "no JSON": (lambda folder: (folder / "tokens.json").write_bytes(b"\0" * 99), "tokens.json: Invalid JSON"),
    "large JSON": (lambda folder: os.truncate(folder / "tokens.json", 10**9), "tokens.json has 1,000,000,000 bytes"),
    "a pickle for JSON": (lambda folder: (folder / "tokens.json").write_bytes(CODE), "tokens.json: Invalid JSON"),
    "a pickle for a shard": (
        lambda folder: (folder / SHARD).write_bytes(CODE.ljust((folder / SHARD).stat().st_size)),
        f"{SHARD}: the checksums are damaged",
    ),
    "torn JSON": (lambda folder: flip_a_bit(folder / "tokens.json", 9), "tokens.json"),
    "dtype O": (lambda folder: change_index(folder, lambda index: index.update(dtype="O")), "dtype: Input should be"),
    "dtype uint32": (lambda folder: change_index(folder, lambda index: index.update(dtype="uint32")), "dtype uint32"),
    "text for a count": (
        lambda folder: change_index(folder, lambda index: index["shards"][0].update(train_tokens="9")),
        "tokens.json: shards.0.train_tokens: Input should be",
    ),
    "negative count": (
        lambda folder: change_index(folder, lambda index: index["shards"][1].update(train_tokens=-2)),
        "tokens.json: shards.1.train_tokens: Input should be",
    ),
    "more tokens": (
        lambda folder: change_index(folder, lambda index: index["shards"][1].update(train_tokens=10**9)),
        "00001.safetensors has ",
    ),
    "no shards": (lambda folder: change_index(folder, lambda index: index.update(shards=[])), "tokens.json: shards"),
    "a file": (lambda folder: (shutil.rmtree(folder), folder.write_text("")), "it is not a folder"),
}


def said(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return the printed lines, except those that say which files a folder stands for, and what of it is not read."""
    lines = capsys.readouterr().out.splitlines()
    return [line for line in lines if ": reads " not in line and ": not read of its rows: " not in line]


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_damaged_is_built_again_and_a_line_says_so(dataset, tmp_path, capsys, damage, monkeypatch):
    monkeypatch.chdir(tmp_path)
    change, reason = DAMAGES[damage]
    built = tokens_of(cached(dataset, tmp_path / "cache"))
    folder = folder_of(tmp_path / "cache")
    change(folder)
    capsys.readouterr()
    assert tokens_of(cached(dataset, tmp_path / "cache")) == built
    first, *_ = said(capsys)
    assert first.startswith(f"token cache {folder}: ")
    assert reason in first
    assert first.endswith("; it is built again")
    assert tokens_of(cached(dataset, tmp_path / "cache")) == built
    assert said(capsys) == []
    assert not Path("code_ran").exists()


@pytest.mark.parametrize("place", ["first token", "last token", "a length", "a checksum"])
def test_damage_is_found_when_it_is_read_and_that_shard_is_built_again(dataset, tmp_path, monkeypatch, place):
    """Not when the cache is opened: it may have terabytes."""
    monkeypatch.setattr(token_cache, "VERIFIED_AT_START", 0)
    built = cached(dataset, tmp_path / "cache")
    places = built._places[2]
    at = {"first token": 0, "last token": places["train"][1] - 1, "a length": places["train_documents"][0]}
    at["a checksum"] = places["checksums"][0]
    expected = tokens_of(built)
    flip_a_bit(built.folder / SHARD, token_shards.HEADER + at[place])
    opened = cached(dataset, tmp_path / "cache")
    first = built.tokens("train")._ends[1]
    opened.tokens("train")[:first]
    with pytest.raises(TrainingError) as raised:
        opened.tokens("train")[first : first + 10]
    line = str(raised.value)
    assert line.startswith(f"token cache {built.folder}: {SHARD}: the checksum")
    assert line.endswith("; it is removed, and the next start builds it again")
    assert not (built.folder / SHARD).exists()
    read = []
    real = shard_builder.build_shard
    monkeypatch.setattr(
        shard_builder, "build_shard", lambda p, d, number, *rest: read.append(number) or real(p, d, number, *rest)
    )
    assert tokens_of(cached(dataset, tmp_path / "cache")) == expected
    assert read == [2]


def test_a_large_shard_is_verified_block_by_block(dataset, tmp_path, monkeypatch):
    for module in (token_shards, shard_builder):
        monkeypatch.setattr(module, "CHECKSUM_BLOCK", 64)
    monkeypatch.setattr(token_cache, "VERIFIED_AT_START", 0)
    built = cached(dataset, tmp_path / "cache")
    expected = tokens_of(built)[0]
    flip_a_bit(built.folder / SHARD, token_shards.HEADER + 130)
    tokens, first = cached(dataset, tmp_path / "cache").tokens("train"), int(built.tokens("train")._ends[1])
    assert tokens[first : first + 64].tolist() == expected[first : first + 64]
    with pytest.raises(TrainingError, match="the checksum of the 64 bytes from 4,224 on differs"):
        tokens[first + 60 : first + 70]


def test_verify_finds_all_damage(dataset, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(token_cache, "VERIFIED_AT_START", 0)
    built = cached(dataset, tmp_path / "cache")
    for number in (1, 4):
        flip_a_bit(built.folder / token_shards.shard_name(number), token_shards.HEADER + 5)
    cached(dataset, tmp_path / "cache")
    assert said(capsys) == []
    assert tokens_of(cached(dataset, tmp_path / "cache", verifies=True)) == tokens_of(cached(dataset, tmp_path / "new"))
    lines = said(capsys)
    assert [line.split(": ")[1] for line in lines] == ["00001.safetensors", "00004.safetensors"]
    assert all(line.endswith("; it is built again") for line in lines)
    assert cached(dataset, tmp_path / "cache", verifies=True).identity == built.identity
    assert said(capsys) == []


def test_verified_blocks_are_not_read_again(dataset, tmp_path, monkeypatch):
    """Of a small cache, which is verified when it is opened."""
    cached(dataset, tmp_path / "cache")
    opened = cached(dataset, tmp_path / "cache")
    monkeypatch.setattr(safetensors, "checksum", lambda data: pytest.fail("verifies again"))
    tokens_of(opened)


def test_a_disk_that_damages_what_is_written_ends_the_build(dataset, tmp_path, monkeypatch):
    real = token_shards.replace_file

    def replace_file(path: Path, content: bytes, **options: Any) -> None:
        real(path, content, **options)
        flip_a_bit(path.parent / SHARD, 4096)

    monkeypatch.setattr(token_shards, "replace_file", replace_file)
    with pytest.raises(TrainingError, match="is damaged right after it was built"):
        cached(dataset, tmp_path / "cache")


def test_files_are_not_opened_to_find_a_complete_cache(dataset, tmp_path, monkeypatch):
    """But for the samples that tell whether they have changed."""
    built = cached(dataset, tmp_path / "cache")
    monkeypatch.setattr("titanlite.data.documents.segment_of", lambda *arguments: pytest.fail("opens a file"))
    assert cached(dataset, tmp_path / "cache").identity == built.identity


def test_a_token_cache_that_others_can_write_is_rejected(dataset, tmp_path):
    built = cached(dataset, tmp_path / "cache")
    for path in [built.folder, built.folder / SHARD, built.folder / "tokens.json"]:
        mode = path.stat().st_mode
        for bit in (0o020, 0o002):
            path.chmod(mode | bit)
            line = rejection(lambda: cached(dataset, tmp_path / "cache"))
            assert line.startswith(f"{path}: other users may write it, and so choose what is trained on; ")
            assert line.endswith(f" chmod -R go-w {path}")
        path.chmod(mode)
    cached(dataset, tmp_path / "cache")


@cases(
    ("complete", "parent", "mode"),
    itertools.product([True, False], ["cache", "", "link"], [0o777, 0o757, 0o775]),
    always=[(True, "link", 0o777), (False, "", 0o777), (False, "cache", 0o757)],
)
def test_a_token_cache_that_others_can_rename_is_rejected(dataset, tmp_path, monkeypatch, parent, mode, complete):
    group = mock.Mock(gr_name=pwd.getpwuid(os.geteuid()).pw_name, gr_mem=["other"])
    monkeypatch.setattr("grp.getgrgid", lambda number: group)
    place, folder, cache = tmp_path / "place", tmp_path / "place" / parent, tmp_path / "place" / "cache"
    (place / "link").mkdir(parents=True)
    if parent == "link":
        cache.symlink_to("link", target_is_directory=True)
    built = cached(dataset, cache).folder
    if not complete:
        shutil.rmtree(built)
    folder.chmod(mode)
    line = rejection(lambda: cached(dataset, cache))
    assert line == (
        f"{folder}: other users may rename what is in it, and so choose what is trained on; choose another "
        f"training.cache_folder, or run chmod +t {folder}"
    )
    folder.chmod(mode | 0o1000)
    cached(dataset, cache)


def test_a_folder_that_the_users_own_group_can_write_is_trusted(dataset, tmp_path, monkeypatch):
    """Many systems give each user such a group, and a umask of 002."""
    own = mock.Mock(gr_name=pwd.getpwuid(os.geteuid()).pw_name, gr_mem=[])
    monkeypatch.setattr("grp.getgrgid", lambda number: own)
    built = cached(dataset, tmp_path / "cache")
    (tmp_path / "cache").chmod(0o775)
    assert cached(dataset, tmp_path / "cache").identity == built.identity


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")
@pytest.mark.parametrize("parent", ["cache", ""])
def test_a_token_cache_in_a_folder_of_another_user_is_rejected(dataset, tmp_path, parent):
    """The sticky bit does not keep the folder's owner from renaming."""
    cached(dataset, tmp_path / "place" / "cache")
    folder = tmp_path / "place" / parent
    folder.chmod(0o1777)
    os.chown(folder, 12345, -1)
    line = rejection(lambda: cached(dataset, tmp_path / "place" / "cache"))
    assert line == (
        f"{folder}: other users may rename what is in it, and so choose what is trained on; choose another "
        "training.cache_folder"
    )


@pytest.mark.parametrize("complete", [True, False])
def test_a_cache_that_is_renamed_to_that_of_another_dataset_is_rejected(dataset, tmp_path, complete):
    other = source("json", write(tmp_path / "other" / "0.jsonl", [f"{n} other text" for n in range(200)]).parent)
    identity = cached(dataset, tmp_path / "cache").identity
    theirs, own = (cached(each, tmp_path / "cache").folder for each in (other, dataset))
    shutil.rmtree(own)
    theirs.rename(own)
    if not complete:
        (own / "tokens.json").unlink()
    line = rejection(lambda: cached(dataset, tmp_path / "cache"))
    file = own / ("tokens.json" if complete else "00000.safetensors")
    assert line == (
        f"{file}: is of another dataset, whose folder was renamed to this one; remove the folder to have it built again"
    )
    shutil.rmtree(own)
    assert cached(dataset, tmp_path / "cache").identity == identity


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")
def test_a_token_cache_of_another_user_is_rejected(dataset, tmp_path):
    built = cached(dataset, tmp_path / "cache")
    for path in [built.folder, built.folder / SHARD, built.folder / "tokens.json"]:
        os.chown(path, 12345, -1)
        line = rejection(lambda: cached(dataset, tmp_path / "cache"))
        assert line.startswith(f"{path}: belongs to user with the ID 12345, who could change what is trained on; ")
        os.chown(path, 0, -1)
    cached(dataset, tmp_path / "cache")


def test_a_new_token_cache_is_writable_by_this_user_only_whatever_the_umask(dataset, tmp_path):
    before = os.umask(0)
    try:
        folder = cached(dataset, tmp_path / "new" / "cache").folder
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (*folder.parents[:2], folder, *folder.iterdir())}
    assert [modes.pop(name) for name in ("new", "cache", folder.name)] == [0o755] * 3
    assert set(modes.values()) == {0o644}, modes


def test_a_write_that_fails_leaves_no_thread_to_the_garbage_collector(dataset, tmp_path, monkeypatch):
    """It may close what an error leaves behind in a thread that is just starting, where waiting for another to end
    waits for ever (seen once, on Python 3.11)."""

    def fail(chunks: Iterable[bytes]) -> Iterator[bytes]:
        yield from itertools.islice(chunks, 1)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shard_builder, "_blocks", fail)
    options = shard_builder.CacheOptions(dataset, 0.0, "")
    segments = list(open_dataset(dataset)[0])
    before = threading.active_count()
    with pytest.raises(OSError, match="No space left") as error:
        shard_builder.build_shard(tmp_path / "shard", "uint16", 0, segments, options, lambda *counts: None, BYTES)
    assert threading.active_count() == before
    assert error.traceback, "which has held the frames until now"
