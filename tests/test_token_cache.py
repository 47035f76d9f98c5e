"""The token cache: built once, for one text, tokenizer and validation fraction, and shared by ranks and nodes."""

import hashlib
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data_helpers import BYTES, MANY, flat, rejection, some_texts
from titanlite import progress
from titanlite.data import token_cache
from titanlite.data.documents import Documents
from titanlite.data.token_cache import is_validation_document, open_token_cache


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
    assert len(contents) == len(list(cache.iterdir())) == len(cases)
    assert cached(Documents("moved", in_memory(texts).batches), cache)[2] in contents, "the hash is of the tokens"


@pytest.mark.parametrize("cleans_up", [True, False], ids=["stopped", "killed"])
def test_an_unfinished_token_cache_is_never_used(tmp_path, monkeypatch, cleans_up):
    documents = in_memory(some_texts())
    broken = Documents(documents.fingerprint, lambda: iter([*documents.batches(), [None]]))
    if not cleans_up:
        monkeypatch.setattr(token_cache.shutil, "rmtree", lambda *arguments, **options: None)
    with pytest.raises(AttributeError, match="NoneType"):
        cached(broken, tmp_path)
    assert bool(list(tmp_path.iterdir())) != cleans_up
    check_split(cached(documents, tmp_path), some_texts())


def test_nodes_that_share_the_folder_may_both_tokenize(tmp_path):
    """The one that is late takes the files of the other."""
    documents = in_memory(some_texts())

    def batches() -> Iterator[list[str]]:
        cached(documents, tmp_path)
        yield from documents.batches()

    check_split(cached(Documents(documents.fingerprint, batches), tmp_path), some_texts())
    assert len(list(tmp_path.iterdir())) == 1, "unfinished files are left"


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
    """What format 2 called held_out.bin is neither found nor misread."""
    documents = in_memory(some_texts())
    with monkeypatch.context() as patch:
        patch.setattr(token_cache, "FORMAT", 2)
        cached(documents, tmp_path)
    (old,) = tmp_path.iterdir()
    (old / "validation.bin").rename(old / "held_out.bin")
    check_split(cached(documents, tmp_path), some_texts())
    (new,) = set(tmp_path.iterdir()) - {old}
    assert {file.name for file in new.iterdir()} == {"train.bin", "validation.bin", "tokens.json"}


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
        deadline, lines = time.monotonic() + 10, ""
        while text not in lines:
            assert time.monotonic() < deadline, f"waited 10 seconds for {text!r}, got {lines!r}"
            time.sleep(0.01)
            lines += capfd.readouterr().err
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
