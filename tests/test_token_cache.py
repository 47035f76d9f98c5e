"""The token cache: built once, for one text, tokenizer and validation fraction, and shared by ranks and nodes."""

import functools
import hashlib
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
import xxhash

from tests.data_helpers import BYTES, MANY, flat, rejection, some_texts, source, write
from tests.launches import wait_until
from titanlite import progress
from titanlite.config.loader import ConfigError
from titanlite.data import token_cache, token_files
from titanlite.data.documents import Documents, load_documents
from titanlite.data.token_cache import is_validation_document, open_token_cache
from titanlite.reliability.folder_lock import FolderLock


@pytest.fixture(autouse=True)
def _fast_lock(monkeypatch):
    monkeypatch.setattr(token_cache, "FolderLock", functools.partial(FolderLock, beat_seconds=0.01))


@pytest.mark.parametrize("fraction", [0.0, 0.001, 0.05, 0.1, 0.29, 1 / 3, 0.5, 0.9])
def test_validation_fraction_is_exact_and_even(fraction):
    """Of the first n documents, n x fraction belong to the validation split, for every n."""
    validation = np.cumsum([is_validation_document(document, fraction) for document in range(5000)])
    assert (np.abs(validation - fraction * np.arange(1, 5001)) < 1).all()
    assert validation[-1] == pytest.approx(5000 * fraction, abs=1 if fraction == 1 / 3 else 0)


def in_memory(texts: list[str]) -> Documents:
    batches = [texts[i : i + 7] for i in range(0, len(texts), 7)]
    return Documents(hashlib.sha256("\0".join(texts).encode()).hexdigest(), lambda: iter(batches))


def cached(
    documents: Documents, cache: Path, tokenizer: Any = BYTES, fraction: float = 0.25, builds_cache: bool = True
) -> tuple[list[int], list[int], str]:
    options = {"cache_folder": str(cache), "builds_cache": builds_cache}
    train, validation, content = open_token_cache(documents, tokenizer, fraction, **options)
    for tokens in (train, validation):
        assert isinstance(tokens, np.memmap)
        assert tokens.itemsize == (4 if tokenizer is MANY else 2)
    return train.tolist(), validation.tolist(), content


def check_split(tokens: tuple[list[int], list[int], str], texts: list[str], every: int = 4, **options: Any) -> None:
    """Every so manieth document is for validation, and it alone; no document is split."""
    assert tokens[1] == flat(texts[every - 1 :: every], **options)
    assert tokens[0] == flat([text for number, text in enumerate(texts, 1) if number % every], **options)


def test_token_cache_is_built_once_for_each_text_tokenizer_and_fraction(tmp_path, assets):
    texts, cache = some_texts(), tmp_path / "cache"
    cases = [(texts, BYTES, 4), ([*texts[:-2], "other", "x"], BYTES, 4), (texts, BYTES, 2)]
    cases += [(texts, assets.open(), 4), (texts, MANY, 4)]
    contents = set()
    for case, tokenizer, every in cases:
        documents = in_memory(case)
        tokens = cached(documents, cache, tokenizer, 1 / every)
        check_split(tokens, case, every, tokenizer=tokenizer)
        asked_again = Documents(documents.fingerprint, lambda: pytest.fail("tokenizes again"))
        assert cached(asked_again, cache, tokenizer, 1 / every) == tokens
        contents.add(tokens[2])
    assert len(contents) == len(list(cache.iterdir())) == len(cases), "a lock or an unfinished folder is left"
    assert cached(Documents("moved", in_memory(texts).batches), cache)[2] in contents, "the hash is of the tokens"


@pytest.mark.parametrize("cleans_up", [True, False], ids=["stopped", "killed"])
def test_an_unfinished_token_cache_is_never_used(tmp_path, monkeypatch, cleans_up):
    documents = in_memory(some_texts())
    broken = Documents(documents.fingerprint, lambda: iter([*documents.batches(), [None]]))
    with monkeypatch.context() as patch:
        if not cleans_up:
            patch.setattr(token_cache.shutil, "rmtree", lambda *arguments, **options: None)
        with pytest.raises(AttributeError, match="NoneType"):
            cached(broken, tmp_path)
    assert bool(list(tmp_path.iterdir())) != cleans_up
    check_split(cached(documents, tmp_path), some_texts())
    assert len(list(tmp_path.iterdir())) == 1, "what the killed run left is still there"


def test_one_run_at_a_time_builds_a_token_cache(tmp_path):
    """Also of two nodes that share the folder: the other one waits, and uses what is there."""
    documents, building, may_build = in_memory(some_texts()), threading.Event(), threading.Event()

    def batches() -> Iterator[list[str]]:
        building.set()
        may_build.wait(10)
        yield from documents.batches()

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(cached, Documents(documents.fingerprint, batches), tmp_path)
        building.wait(10)
        never = Documents(documents.fingerprint, lambda: pytest.fail("tokenizes too"))
        second = pool.submit(cached, never, tmp_path)
        time.sleep(0.1)
        assert not second.done()
        may_build.set()
        assert second.result(10) == first.result(10)
    assert len(list(tmp_path.iterdir())) == 1, "unfinished files or a lock are left"


def test_other_ranks_of_a_node_wait_for_the_token_cache(tmp_path):
    documents, may_build = in_memory(some_texts()), threading.Event()

    def batches() -> Iterator[list[str]]:
        may_build.wait(10)
        yield from documents.batches()

    with ThreadPoolExecutor(2) as pool:
        never = Documents(documents.fingerprint, lambda: pytest.fail("tokenizes too"))
        waiting = pool.submit(cached, never, tmp_path, builds_cache=False)
        building = pool.submit(cached, Documents(documents.fingerprint, batches), tmp_path)
        assert not waiting.done()
        may_build.set()
        assert waiting.result(10) == building.result(10)


def test_a_folder_that_cannot_be_written_is_rejected(tmp_path):
    (tmp_path / "file").write_text("")
    line = rejection(lambda: cached(in_memory(["a"]), tmp_path / "file" / "cache"))
    assert line.startswith(f'training.cache_folder = "{tmp_path}/file/cache": cannot be written: ')


def test_a_token_cache_of_another_format_is_built_again(tmp_path, monkeypatch):
    """Its files are neither found nor misread."""
    documents = in_memory(some_texts())
    with monkeypatch.context() as patch:
        patch.setattr(token_files, "FORMAT", 3)
        cached(documents, tmp_path)
    (old,) = tmp_path.iterdir()
    (old / "validation.bin").unlink()
    check_split(cached(documents, tmp_path), some_texts())
    (new,) = set(tmp_path.iterdir()) - {old}
    assert {file.name for file in new.iterdir()} == {"train.bin", "validation.bin", "tokens.json", "verified.json"}


def test_progress_of_the_token_cache(tmp_path, monkeypatch, capfd):
    """The rank that builds it reports documents, tokens and bytes; one of those that wait says so."""
    monkeypatch.setattr(progress, "INTERVAL_SECONDS", 0.01)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    texts, reported = ["abc"] * 14, threading.Event()

    def batches() -> Iterator[list[str]]:
        yield texts[:7]
        reported.wait(10)
        yield texts[7:]

    def stderr_with(text: str) -> str:
        lines = ""

        def printed() -> bool:
            nonlocal lines
            lines += capfd.readouterr().err
            return text in lines

        wait_until(printed, text, seconds=10)
        return lines

    documents = Documents("fingerprint", batches, count=14)
    with ThreadPoolExecutor(2) as pool:
        building = pool.submit(cached, documents, tmp_path)
        lines = stderr_with("7 of 14 documents")
        assert re.search(
            r"building the token cache: 7 of 14 documents, .* left; 35 tokens, \d+\.\d MB/s of text\n", lines
        )
        waiting = pool.submit(cached, documents, tmp_path, builds_cache=False)
        stderr_with("waiting until another rank has built the token cache: 0:00:00\n")
        reported.set()
        assert waiting.result(10) == building.result(10)
        capfd.readouterr()
        cached(documents, tmp_path)
        assert not capfd.readouterr().err, "a cache that is there is not reported"


# Damaged and hostile files -------------------------------------------------------------------------------------------


def change_json(folder: Path, **changes: Any) -> None:
    """Change keys of tokens.json ("train.bytes" is in an object), with a correct checksum."""
    file = folder / "tokens.json"
    content = json.loads(file.read_text())
    for key, value in changes.items():
        *outer, name = key.split("__")
        (content[outer[0]] if outer else content)[name] = value
    del content["xxh3_64"]
    file.write_text(json.dumps({**content, "xxh3_64": xxhash.xxh3_64_hexdigest(json.dumps(content).encode())}))


def poison(folder: Path, token: int) -> None:
    """Replace the first token; its checksum and all others are made to fit."""
    file = folder / "train.bin"
    tokens = np.fromfile(file, "uint16")
    tokens[0] = token
    tokens.tofile(file)
    change_json(folder, train__xxh3_64=xxhash.xxh3_64_hexdigest(tokens.tobytes()), train__largest_token=token)


def replace(file: Path, make: Callable[[Path], None]) -> None:
    file.unlink()
    make(file)


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[7] ^= 1
    file.write_bytes(content)


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a bit of the tokens": (lambda folder: flip_a_bit(folder / "train.bin"), "train.bin: the checksum differs"),
    "cut off": (lambda folder: os.truncate(folder / "train.bin", 100), "train.bin has 100 bytes, and tokens.json says"),
    "longer": (lambda folder: os.truncate(folder / "validation.bin", 10**6), "validation.bin has 1,000,000 bytes"),
    "no file": (lambda folder: (folder / "validation.bin").unlink(), "validation.bin is missing"),
    "no JSON": (lambda folder: (folder / "tokens.json").write_bytes(b"\0" * 99), "tokens.json: Invalid JSON"),
    "large JSON": (lambda folder: os.truncate(folder / "tokens.json", 10**9), "tokens.json has 1,000,000,000 bytes"),
    "torn JSON": (lambda folder: flip_a_bit(folder / "tokens.json"), "tokens.json"),
    "dtype O": (lambda folder: change_json(folder, dtype="O"), "tokens.json: dtype: Input should be 'uint16' or"),
    "dtype uint32": (lambda folder: change_json(folder, dtype="uint32"), "dtype uint32 for a vocabulary of 258"),
    "text for a count": (
        lambda folder: change_json(folder, tokens="9"),
        "tokens.json: tokens: Input should be",
    ),
    "negative size": (lambda folder: change_json(folder, train__bytes=-2), "tokens.json: train.bytes: Input should be"),
    "odd size": (lambda folder: change_json(folder, train__bytes=3), "the sizes of the files do not fit"),
    "more tokens": (lambda folder: change_json(folder, tokens=10**9), "do not fit 1,000,000,000 tokens"),
    "unknown key": (
        lambda folder: change_json(folder, order="F"),
        "tokens.json: order: Extra inputs",
    ),
    "token out of range": (lambda folder: poison(folder, 258), "train.bin has a token 258, and the vocabulary 258"),
    "false maximum": (lambda folder: change_json(folder, train__largest_token=3), "train.bin: the checksum differs"),
    "a pipe": (lambda folder: replace(folder / "train.bin", os.mkfifo), "train.bin is not a regular file"),
    "a link": (
        lambda folder: replace(folder / "train.bin", lambda file: file.symlink_to("/dev/zero")),
        "not a regular",
    ),
    "a file": (lambda folder: (shutil.rmtree(folder), folder.write_text("")), "it is not a folder"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_token_cache_is_built_again_and_says_so(tmp_path, capsys, damage):
    documents, (change, reason) = in_memory(some_texts()), DAMAGES[damage]
    built = cached(documents, tmp_path)
    (folder,) = tmp_path.iterdir()
    change(folder)
    capsys.readouterr()
    assert cached(documents, tmp_path) == built
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"token cache {folder}: ")
    assert reason in line
    assert line.endswith("; it is removed and built again")
    assert cached(documents, tmp_path) == built
    assert capsys.readouterr().out == ""


def test_checksums_are_verified_once_and_when_a_file_has_changed(tmp_path, monkeypatch):
    documents, verified = in_memory(some_texts()), []
    verify = token_files.verify
    monkeypatch.setattr(token_files, "verify", lambda folder, *rest: (verified.append(folder), verify(folder, *rest)))
    built = cached(documents, tmp_path)
    (folder,) = tmp_path.iterdir()
    assert cached(documents, tmp_path) == built
    assert verified == [], "a new cache is verified, though its checksums are those of what was written"
    changes = [lambda: os.utime(folder / "train.bin", ns=(1, 1)), (folder / "verified.json").unlink]
    changes += [lambda: (folder / "verified.json").write_text("[")]
    for number, change in enumerate(changes, 1):
        change()
        assert cached(documents, tmp_path) == cached(documents, tmp_path) == built
        assert len(verified) == number


def test_waiting_ranks_wait_until_a_changed_cache_is_verified(tmp_path):
    documents = in_memory(some_texts())
    built = cached(documents, tmp_path)
    (folder,) = tmp_path.iterdir()
    flip_a_bit(folder / "train.bin")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(cached, documents, tmp_path, builds_cache=False)
        time.sleep(0.2)
        assert not waiting.done()
        assert cached(documents, tmp_path) == waiting.result(10) == built


def test_a_token_cache_that_cannot_be_written_is_verified_by_each_rank(tmp_path, monkeypatch):
    documents = in_memory(some_texts())
    built = cached(documents, tmp_path)
    (folder,) = tmp_path.iterdir()
    (folder / "verified.json").unlink()
    monkeypatch.setattr(os, "access", lambda *arguments: False)
    assert cached(documents, tmp_path, builds_cache=False) == built
    flip_a_bit(folder / "train.bin")
    line = rejection(lambda: cached(documents, tmp_path, builds_cache=False))
    assert line == f"token cache {folder}: train.bin: the checksum differs"


FILES_OF_A_CACHE = ("", "train.bin", "validation.bin", "tokens.json", "verified.json")


def test_a_token_cache_that_others_can_write_is_rejected(tmp_path):
    documents = in_memory(some_texts())
    cached(documents, tmp_path)
    (folder,) = tmp_path.iterdir()
    for path in [folder / name for name in FILES_OF_A_CACHE]:
        mode = path.stat().st_mode
        for bit in (0o020, 0o002):
            path.chmod(mode | bit)
            for builds_cache in (True, False):
                line = rejection(lambda builds=builds_cache: cached(documents, tmp_path, builds_cache=builds))
                assert line.startswith(f"{path}: other users may write it, and so choose what is trained on; ")
                assert line.endswith(f" chmod -R go-w {path}")
            path.chmod(mode)
    cached(documents, tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")
def test_a_token_cache_of_another_user_is_rejected(tmp_path):
    documents = in_memory(some_texts())
    cached(documents, tmp_path)
    (folder,) = tmp_path.iterdir()
    for path in [folder / name for name in FILES_OF_A_CACHE]:
        os.chown(path, 12345, -1)
        for builds_cache in (True, False):
            line = rejection(lambda builds=builds_cache: cached(documents, tmp_path, builds_cache=builds))
            assert line.startswith(f"{path}: belongs to user with the ID 12345, who could change what is trained on; ")
        os.chown(path, 0, -1)
    cached(documents, tmp_path)


def test_a_new_token_cache_is_writable_by_this_user_only_whatever_the_umask(tmp_path):
    before = os.umask(0)
    try:
        cached(in_memory(some_texts()), tmp_path)
    finally:
        os.umask(before)
    (folder,) = tmp_path.iterdir()
    modes = {path.name: path.stat().st_mode & 0o777 for path in (folder, *folder.iterdir())}
    assert modes.pop(folder.name) == 0o755
    assert set(modes.values()) == {0o644}, modes


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path, monkeypatch):
    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(token_cache._SplitWriter, "write", full)
    line = rejection(lambda: cached(in_memory(some_texts()), tmp_path))
    assert line == f'training.cache_folder = "{tmp_path}": cannot be written: No space left on device'
    assert list(tmp_path.iterdir()) == []


def build_while_a_file_changes(folder: Path) -> str:
    """Build the cache of a file that changes after rank 0 has looked at it and before rank 1 has."""
    rank, documents = dist.get_rank(), folder / "a.txt"
    for looks in range(2):
        if rank == looks:
            loaded = load_documents(source("text", documents))
        dist.barrier()
        if rank == looks == 0:
            documents.write_text("another text")
        dist.barrier()
    try:
        return open_token_cache(loaded, BYTES, 0.0, cache_folder=str(folder / "cache"), builds_cache=rank == 0)[2]
    except ConfigError as error:
        return "\n".join(error.problems)


def test_a_file_that_changes_between_the_looks_of_two_ranks_is_rejected(ranks, tmp_path):
    write(tmp_path / "a.txt", ["a text"])
    (line,) = set(ranks(2).run(build_while_a_file_changes, folder=tmp_path))
    path = f'training.dataset_path = "{tmp_path}/a.txt"'
    assert line.startswith(f"{path}: rank 1 read other documents than rank 0 of its node: a file changed meanwhile;")
