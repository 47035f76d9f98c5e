"""titanlite tokenize: what it prints, and how it ends when it is asked to stop."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.helpers.data import flat, rejection, some_texts, write
from tests.helpers.launches import wait_until
from titanlite.data import token_cache
from titanlite.tools import tokenize as command

OPTIONS = ["debug", "--training.dataset=json", "--validation.fraction=0.25", "--training.seq_len=16"]


def options(tmp_path: Path, **more: object) -> list[str]:
    paths = {"dataset_path": tmp_path / "a.jsonl", "cache_folder": tmp_path / "cache"}
    return [*OPTIONS, *(f"--training.{key}={value}" for key, value in {**paths, **more}.items())]


def test_it_says_what_the_run_reads(tmp_path, capsys):
    texts = some_texts()
    write(tmp_path / "a.jsonl", texts)
    command.tokenize(options(tmp_path))
    _, unread, folder, training, validation = capsys.readouterr().out.splitlines()
    assert unread.endswith(': not read of its rows: "id", "other"')
    assert folder.startswith(f"{tmp_path}/cache/")
    assert folder.endswith(": shards: 1")
    n_tokens = len(flat([text for number, text in enumerate(texts, 1) if number % 4]))
    per_token = sum(map(len, texts)) / len(flat(texts))
    sequences = (n_tokens - 1) // 16
    assert training.startswith(
        f"training: 45 documents, {n_tokens:,} tokens, {per_token:.2f} bytes of text per token; "
    )
    assert f"an epoch has {sequences:,} packed sequences of 16 tokens, {sequences / 16:.1f} steps; " in training
    assert training.endswith(f"training.steps = 120 reads {120 / (sequences / 16):.3g} epochs")
    assert validation.startswith(f"validation: 15 documents, {len(flat(texts[3::4])):,} tokens, ")


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("batch", "option", "note"),
    [
        (2, "global_batch_size=2", ""),  # of fewer ranks than a node of plan.device has
        (1, "global_batch_size=-1", "training.global_batch_size = -1: steps and epochs are those of 1 rank\n"),
    ],
)
def test_the_tokens_do_not_depend_on_the_ranks(tmp_path, capsys, batch, option, note):
    write(tmp_path / "a.jsonl", some_texts())
    command.tokenize([*options(tmp_path, local_batch_size=1), f"--training.{option}"])
    out = capsys.readouterr().out
    assert out.startswith(f"{note}{tmp_path}/cache/")
    sequences = int(re.search(r"an epoch has ([\d,]+) packed", out)[1].replace(",", ""))
    assert f"packed sequences of 16 tokens, {sequences / batch:,.1f} steps; " in out


def test_a_dataset_without_a_packed_sequence_is_one_line(tmp_path):
    write(tmp_path / "a.jsonl", ["a"])
    line = rejection(lambda: command.tokenize(options(tmp_path, seq_len=64)))
    assert line == (
        "training.seq_len = 64: the dataset has 1 documents, 3 tokens, 0.33 bytes of text per token, too few for a "
        "packed sequence; set it lower, or train on more text"
    )


def test_verify_builds_damaged_shards_again(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(token_cache, "VERIFIED_AT_START", 0)
    write(tmp_path / "a.jsonl", some_texts())
    command.tokenize(options(tmp_path))
    first, _, *others = capsys.readouterr().out.splitlines(keepends=True)
    before = "".join([first, *others])  # columns that are not read are named when the cache is built
    (shard,) = (tmp_path / "cache").glob("*/*.safetensors")
    content = shard.read_bytes()
    shard.write_bytes(content[:4096] + bytes([content[4096] ^ 1]) + content[4097:])
    command.tokenize(options(tmp_path))
    assert capsys.readouterr().out == before, "damage is found when it is read"
    command.tokenize([*options(tmp_path), "--verify"])
    assert "00000.safetensors: the checksum of the " in capsys.readouterr().out
    assert shard.read_bytes() == content


@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_within_a_second_and_leaves_no_unfinished_file(tmp_path, number):
    with (tmp_path / "a.jsonl").open("w") as file:
        for row in range(60_000):
            file.write(json.dumps({"text": f"{row} " * 200}) + "\n")
    arguments = [sys.executable, "-m", "titanlite", "tokenize", *options(tmp_path)]
    process = subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True)
    wait_until(lambda: list((tmp_path / "cache").glob("*/*.tmp")), "a shard is being built", seconds=60)
    begin = time.monotonic()
    os.kill(process.pid, number)
    assert process.wait(30) == 0
    assert time.monotonic() - begin < 1
    assert process.stderr
    assert process.stderr.read().splitlines()[-1] == "asked to stop; run the command again to continue"
    (folder,) = (tmp_path / "cache").iterdir()
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("arguments", [["--help"], []])
def test_help(arguments, capsys):
    assert command.main(arguments) == 0
    assert "Tokenize the dataset of a config before a run" in capsys.readouterr().out
