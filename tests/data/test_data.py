"""From options to sequences: training and validation split, and the identity of the data."""

import shutil
import time
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.helpers.data import BYTES, T, as_lists, built_in_texts, flat, rejection, some_texts, training, write
from titanlite import build, config
from titanlite.config.loader import ConfigError
from titanlite.config.schema import Validation
from titanlite.data import open as opening
from titanlite.data.packing import Sequences, ValidationSequences
from titanlite.techniques.data.streaming import StreamingSequences

pytestmark = pytest.mark.usefixtures("offline")


Validated = dict[str, Any]  # options of [validation]


def open_sequences(
    tmp_path: Path, validation: Validated | None = None, *, tokenizer: Any = BYTES, seed: int = 0, **options: Any
) -> tuple[Sequences, ValidationSequences | None, str]:
    trained = training(**{"cache_folder": str(tmp_path / "cache"), "streaming_shards": 1} | options)
    validated = Validation(**{"enable": True} | (validation or {}))
    return opening.open_sequences(tokenizer, trained, validated, seed=seed, builds_cache=True)


def test_built_in_text_is_packed_and_split(tmp_path):
    sequences, validation, _ = open_sequences(tmp_path)
    texts = built_in_texts()
    for_validation = [number for number in range(len(texts)) if (number + 1) * 5 // 100 > number * 5 // 100]
    assert len(for_validation) == len(texts) // 20
    assert sequences.tokens[:].tolist() == flat(
        [text for number, text in enumerate(texts) if number not in for_validation]
    )
    assert validation.tokens[:].tolist() == flat([texts[number] for number in for_validation])
    without = open_sequences(tmp_path, {"enable": False})
    assert without[1] is None
    assert without[0].tokens[:].tolist() == sequences.tokens[:].tolist(), "validation must not change the training data"
    line = rejection(lambda: open_sequences(tmp_path, {"fraction": 1e-6}))
    assert line.startswith("validation.fraction = 1e-06: selects no document")
    shown = float(line.partition("set it to ")[2].partition(" or higher")[0])
    assert open_sequences(tmp_path, {"fraction": shown})[1].n_sequences > 0, "the hint helps"


@pytest.mark.parametrize("sample_by", ["document", "line"])
def test_the_hint_for_one_document_is_not_a_larger_fraction(tmp_path, sample_by):
    file = write(tmp_path / "a.txt", ["one document " * 9])
    options = {"dataset": "text", "dataset_path": str(file), "text_sample_by": sample_by}
    line = rejection(lambda: open_sequences(tmp_path, {"fraction": 0.99}, **options))
    assert ("training.text_sample_by" in line) == (sample_by == "document")
    assert "or higher" not in line
    assert "validation.dataset_path" in line


@pytest.mark.parametrize("streaming", [False, True])
def test_files_of_its_own_for_the_validation_split(tmp_path, streaming):
    file, own = (
        write(tmp_path / "train.jsonl", some_texts()),
        write(tmp_path / "own.jsonl", ["validate", "on this"]),
    )
    options = {"dataset": "json", "dataset_path": str(file), "streaming": streaming}
    sequences, validation, _ = open_sequences(tmp_path, {"dataset_path": str(own)}, **options)
    assert as_lists(next(sequences.read(0, 1))[0])[0] == flat(some_texts())[:T]
    assert (
        isinstance(sequences, StreamingSequences) if streaming else sequences.tokens[:].tolist() == flat(some_texts())
    )
    assert validation.tokens[:].tolist() == flat(["validate", "on this"])
    for path, reason in ((tmp_path / "nowhere", "no such file"), (write(tmp_path / "none", [None]), "null")):
        line = rejection(lambda path=path: open_sequences(tmp_path, {"dataset_path": str(path)}, **options))
        assert line.startswith(f'validation.dataset_path = "{path}": ')
        assert reason in line


@pytest.mark.parametrize("streaming", [False, True])
def test_identity_names_what_global_indices_mean(tmp_path, assets, streaming):
    """With a token cache it is a hash of the tokens; so it also tells that changed files are tokenized again."""
    folder, copy = tmp_path / "files", tmp_path / "copy"
    for number in range(2):
        write(folder / f"{number}.jsonl", some_texts())
        write(folder / f"{number}.txt", ["one", "two"])

    def identity(**changed: Any) -> str:
        options = {"dataset": "json", "dataset_path": str(folder), "streaming": streaming, "streaming_shards": 2}
        return open_sequences(tmp_path, **{"validation": {"enable": False}} | options | changed)[2]

    changes = [{}, {"seq_len": 32}, {"dataset_text_key": "other"}, {"tokenizer": assets.open()}]
    changes += [{"dataset": "text"}, {"dataset": "text", "text_sample_by": "line"}]
    only_cached = [{"shuffle": True}, {"shuffle": True, "seed": 1}]
    only_cached += [{"validation": {"enable": False, "fraction": 0.1}}]
    changes += [{"streaming_shards": 1}] if streaming else only_cached
    identities = [identity(**change) for change in changes]

    shutil.copytree(folder, copy, copy_function=shutil.copyfile)  # with times of its own
    same = [{}, {"cache_folder": str(tmp_path / "elsewhere")}, {"dataset_path": str(copy)}]
    same += [] if streaming else [{"validation": {"enable": True}}]
    assert {identity(**change) for change in same} == {identities[0]}

    for texts in (["another file"], ["another text"]):
        write(folder / "2.jsonl", texts)
        identities.append(identity())
    assert len(set(identities)) == len(identities)


def build_in_rank(job: Path, paths: list[Path]) -> str:
    """The identity of a rank's data, or how it is rejected."""
    launch = config.Launch.from_environment(n_devices=0)
    arguments = [f"--training.dataset_path={paths[launch.rank]}", f"--training.cache_folder={job.parent / 'cache'}"]
    try:
        return build.build_data(config.check(config.load([str(job), *arguments]), launch), builds_cache=True)[2]
    except ConfigError as error:
        return "\n".join(error.problems)


def build_after(job: Path, path: Path, seconds: float) -> str:
    """The identity of a rank's data, where the second rank opens it later than the timeout of collectives."""
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    before = backend.options._timeout
    backend._set_default_timeout(timedelta(seconds=1))
    open_sequences = build.open_sequences

    def open_late(*arguments: Any, **options: Any) -> Any:
        sequences = open_sequences(*arguments, **options)
        time.sleep(seconds if dist.get_rank() == 1 else 0)
        return sequences

    try:
        with mock.patch.object(build, "open_sequences", open_late):
            return build_in_rank(job, [path] * 2)
    finally:
        backend._set_default_timeout(before)


@pytest.mark.nightly
def test_a_node_that_tokenizes_for_long_is_waited_for(ranks, tmp_path):
    job = tmp_path / "job.toml"
    job.write_text('[validation]\nenable = false\n[training]\nseq_len = 16\ndataset = "json"\n')
    write(tmp_path / "a" / "0.jsonl", some_texts())
    first, second = ranks(2).run(build_after, job=job, path=tmp_path / "a", seconds=3)
    assert first == second
    assert "seq_len 16" in first


STREAMING = "streaming = true\nshuffle = false\nstreaming_shards = 2\n"


@pytest.mark.parametrize("reading", ["", STREAMING], ids=["cached", "streaming"])
def test_ranks_that_read_different_data_are_rejected(ranks, tmp_path, reading):
    job = tmp_path / "job.toml"
    job.write_text(f'[validation]\nenable = false\n[training]\nseq_len = 16\ndataset = "json"\n{reading}')
    for folder, first in (("a", "one"), ("same", "one"), ("other", "two")):
        for number in range(2):
            write(tmp_path / folder / f"{number}.jsonl", [first, *some_texts()])
    of_one, of_other = ranks(2).run(build_in_rank, job=job, paths=[tmp_path / "a", tmp_path / "same"])
    assert of_one == of_other
    assert "seq_len 16" in of_one
    rejected = ranks(2).run(build_in_rank, job=job, paths=[tmp_path / "a", tmp_path / "other"])
    assert rejected == ["training.dataset_path: rank 1 reads other data than rank 0; give all nodes the same"] * 2
