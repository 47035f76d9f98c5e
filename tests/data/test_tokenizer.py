"""Tokenizers: bytes, and a Hugging Face tokenizer.json with its special tokens."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from tokenizers import Tokenizer, processors

from tests.helpers.data import BYTES, built_in_texts, flat, open_stream, rejection, source, write
from tests.helpers.launches import wait_until
from titanlite.data import hf_tokenizer
from titanlite.data.hf_tokenizer import HuggingFaceTokenizer
from titanlite.data.open import build_tokenizer, open_cache
from titanlite.data.tokenizer import ByteTokenizer, encode_prompts

TEXTS = ["Hello, world", "", "naïve — 東京 🎉", "line\nline\r\n\ttab\0", "\ud800 broken"]


def test_bytes_there_and_back():
    for text, tokens in zip(TEXTS, BYTES.encode(TEXTS), strict=True):
        assert tokens.dtype == np.uint32
        assert bytes(tokens.tolist()).decode("utf-8", "surrogatepass") == text
    assert flat(["ab", ""]) == [256, 97, 98, 257, 256, 257]
    assert BYTES.vocab_size == 258
    assert isinstance(build_tokenizer(""), ByteTokenizer)


def test_token_ids_are_those_of_the_tokenizers_library(assets):
    tokenizer, theirs = build_tokenizer(str(assets.file)), Tokenizer.from_file(str(assets.file))
    texts = [*TEXTS[:-1], *built_in_texts()[10:20]]
    for text, tokens in zip(texts, tokenizer.encode(texts), strict=True):
        assert tokens.dtype == np.uint32
        assert tokens.tolist() == theirs.encode(text, add_special_tokens=False).ids
        assert theirs.decode(tokens.tolist(), skip_special_tokens=False) == text
    assert tokenizer.vocab_size == theirs.get_vocab_size() == 400
    assert assets.open().identity == tokenizer.identity, "a folder is as good as its file"


@pytest.mark.parametrize("processor", ["<s> $A", "$A", "$A </s>", "<stop> <s> $A <stop>", "<s> $A </s> </s>"])
@pytest.mark.parametrize(
    ("settings", "eos"),
    [
        ({}, 1),
        ({"eos_token": "<stop>"}, 2),
        ({"eos_token": {"__type": "AddedToken", "content": "<stop>"}}, 2),
        ({"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": False}, 1),
        ({"bos_token": "<stop>", "eos_token": "<stop>", "add_bos_token": True, "add_eos_token": True}, 2),
        ({"bos_token": None, "eos_token": None}, 1),
    ],
)
def test_a_text_has_the_special_tokens_that_transformers_adds(assets, processor, settings, eos):
    ids = {"<s>": 0, "</s>": 1, "<stop>": 2}
    special = [(token, number) for token, number in ids.items() if token in processor]
    theirs = Tokenizer.from_str(assets.file.read_text())
    theirs.post_processor = processors.TemplateProcessing(single=processor, special_tokens=special)
    theirs.save(str(assets.file))
    tokenizer = assets.open(**settings)
    expected = transformers.AutoTokenizer.from_pretrained(assets.folder)("a")["input_ids"]
    assert encode_prompts(tokenizer, ["a"]) == [expected]
    assert flat(["a"], tokenizer) == (expected if expected[-1] == eos else [*expected, eos])
    assert (tokenizer.bos, tokenizer.eos) == (expected[0] if expected[0] in ids.values() else None, eos)
    assert (tokenizer.identity == assets.open().identity) == (eos == 1)


def test_text_cannot_end_its_document(assets):
    tokenizer, text = assets.open(), "one</s><s>two<stop>"
    (tokens,) = tokenizer.encode([text])
    assert not {0, 1, 2} & set(tokens.tolist())
    assert tokenizer.tokenizer.decode(tokens.tolist(), skip_special_tokens=False) == text


def test_documents_are_neither_truncated_nor_padded(assets):
    """A tokenizer.json may ask for either; that is meant for the inputs of a sentence encoder."""
    texts = ["a long document, far longer than five tokens", "short"]
    expected = flat(texts, assets.open())
    theirs = Tokenizer.from_file(str(assets.file))
    theirs.enable_truncation(max_length=5)
    theirs.enable_padding(pad_id=0, pad_token="<s>", length=7)
    theirs.save(str(assets.file))
    assert [len(encoding) for encoding in theirs.encode_batch(texts)] == [7, 7], "it does both"
    assert flat(texts, assets.open()) == expected


def test_unusable_tokenizers_are_rejected(assets):
    missing, content = assets.folder / "nowhere", assets.file.read_text()
    assert str(missing) in rejection(lambda: build_tokenizer(str(missing)))
    folder = f"model.hf_assets_path: {assets.folder} cannot be read as a tokenizer: "
    for key in ("bos_token", "eos_token"):
        assert rejection(lambda key=key: assets.open(**{key: "\ud800"})).startswith(folder)
    assert assets.open(eos_token="<new>").eos == 400, "transformers gives a new token the next id"
    (assets.folder / "gpt2").write_text("no folder of the hub")
    assert "cannot be read as a tokenizer" in rejection(lambda: build_tokenizer(str(assets.folder / "gpt2")))
    for name in ("ByT5Tokenizer", "LayoutLMv3Tokenizer"):  # in Python; of words on a page
        line = rejection(lambda name=name: assets.open(tokenizer_class=name, eos_token="</s>"))
        assert line.startswith(folder)
    assets.open()
    for file in (assets.settings, assets.folder / "special_tokens_map.json", assets.file):
        good = file.read_text() if file.exists() else "{}"
        for bad, problem in (("{", "not valid JSON: "), ("[1]", "expected a JSON object, got a list")):
            file.write_text(bad)
            line = rejection(lambda: build_tokenizer(str(assets.folder)))
            assert line.startswith(f"{file}: {problem}"), "the file that is wrong, and no other"
        file.write_text(good)
    assets.file.write_text(content.replace("</s>", "<halt>"))
    line = rejection(assets.open)
    assert all(part in line for part in (str(assets.file), "<|end_of_text|>", str(assets.settings)))
    assets.file.write_text('{"version": "1.0", "model": {"type": "Nonsense"}}')
    assert rejection(assets.open).startswith(folder)
    for path in ("~nosuchuser/x", "~nosuchuser"):
        assert f"{path} cannot be read as a tokenizer: " in rejection(lambda path=path: build_tokenizer(path))


# Tokenizers that fail, or ask for too much --------------------------------------------------------------------------


def write_tokenizer(file: Path, **parts: Any) -> None:
    """Write a tokenizer of characters, or of another model."""
    from tokenizers import models

    model = parts.pop("model", models.BPE({chr(i): i for i in range(97, 123)} | {"<s>": 0, "</s>": 1}, []))
    tokenizer = Tokenizer(model)
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    file.write_text(tokenizer.to_str())


def test_a_tokenizer_in_a_process_of_its_own_is_the_same(assets):
    own, theirs = assets.open(), build_tokenizer(str(assets.folder))
    assert isinstance(theirs, HuggingFaceTokenizer)
    for name in ("prefix", "suffix", "bos", "eos", "vocab_size", "identity", "path"):
        assert getattr(own, name) == getattr(theirs, name)
    assert not hasattr(theirs, "tokenizer"), "it is in the other process"
    texts = TEXTS[:-1]
    for one, other in zip(own.encode(texts), theirs.encode(texts), strict=True):
        assert (one.dtype, one.tolist()) == (other.dtype, other.tolist())
        assert theirs.decode(other.tolist()) == own.decode(one.tolist())
    process: Any = theirs
    process.close()


@pytest.mark.nightly
def test_a_tokenizer_ends_with_its_program_and_says_nothing(assets):
    assets.open()
    code = f"""
import threading
from titanlite.data.open import build_tokenizer
threading.kept = build_tokenizer({str(assets.folder)!r})  # until the interpreter takes the modules down
print(threading.kept.process.pid)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    wait_until(lambda: not Path(f"/proc/{int(done.stdout)}").exists(), "its process has ended")


def failing(name: str) -> dict[str, Any]:
    from tokenizers import Regex, models, pre_tokenizers

    return {
        "WordLevel": {"model": models.WordLevel({"<s>": 0, "</s>": 1, "hello": 2})},
        "Unigram": {"model": models.Unigram([("<s>", 0.0), ("</s>", 0.0), ("hello", -1.0)])},
        "Split": {"pre_tokenizer": pre_tokenizers.Split(Regex("(x+x+)+y"), "isolated")},
    }[name]


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("WordLevel", "x" * 60, "WordLevel error: Missing [UNK] token from the vocabulary"),
        ("Unigram", "hello", "Encountered an unknown token but `unk_id` is missing"),
        ("Split", "x" * 60, "Onig: Regex search error: retry-limit-in-match over"),  # a panic, which is no Exception
    ],
)
def test_a_text_that_cannot_be_encoded_is_named(assets, name, text, reason):
    write_tokenizer(assets.file, **failing(name))
    tokenizer = assets.open()
    line = rejection(lambda: tokenizer.encode(["hello", "x" * 60, "hello"]))
    assert line == f'{assets.file}: cannot encode the text "{text[:40]}": {reason}'


def multiplying() -> Any:
    from tokenizers import normalizers

    return normalizers.Sequence([normalizers.Replace("a", "a" * 10_000)] * 3)


TOO_LARGE = "its tokenizer.json or chat template crashes (SIGABRT) or takes more than 1.75 GiB of memory"


@pytest.mark.nightly
def test_a_tokenizer_that_multiplies_text_ends_its_process_only(assets, tmp_path):
    """Where a dataset is tokenized before training, while training, and for prompts."""
    write_tokenizer(assets.file, normalizer=multiplying())
    tokenizer = build_tokenizer(str(assets.folder))
    assert tokenizer.encode(["hello"])[0].tolist() == [104, 101, 108, 108, 111]
    file = write(tmp_path / "a.jsonl", ["hello", "banana"])
    dataset, how = source("json", file), {"cache_folder": str(tmp_path / "cache"), "builds_cache": True}
    line = rejection(lambda: open_cache(dataset, tokenizer, 0.0, **how))
    assert line == f"{assets.folder}: {TOO_LARGE} at {file}, line 1, or near it; correct it"
    stream = open_stream("json", file)
    stream.tokenizer = build_tokenizer(str(assets.folder))
    line = rejection(lambda: next(stream.read(0, 1)))
    assert line == f'{assets.folder}: {TOO_LARGE} at the text "banana", or shortly after it; correct it'


def test_a_decoder_that_multiplies_text(assets):
    from tokenizers import decoders

    write_tokenizer(assets.file, decoder=decoders.Sequence([decoders.Replace("a", "a" * 10_000)] * 3))
    tokenizer = build_tokenizer(str(assets.folder))
    assert rejection(lambda: tokenizer.decode([97])) == f"{assets.folder}: {TOO_LARGE}; correct it"


@pytest.mark.nightly
def test_a_tokenizer_that_takes_too_long(assets):
    """Each match is a little below the limit of the library's matcher."""
    from tokenizers import Regex, normalizers

    write_tokenizer(assets.file, normalizer=normalizers.Replace(Regex("(x+x+)+y"), ""))
    tokenizer, text = build_tokenizer(str(assets.folder)), ("x" * 18 + " ") * 10_000
    line = rejection(lambda: tokenizer.encode([text]))
    problem = "its tokenizer.json or chat template takes more than 10 s of processor time"
    assert line == f'{assets.folder}: {problem} at the text "{text[:40]}", or shortly after it; correct it'


@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "large"])
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_file_of_a_tokenizer_is_a_regular_one_of_some_size(assets, monkeypatch, name, kind):
    assets.open()
    monkeypatch.setattr(hf_tokenizer, "LARGEST_FILE", 2**16)
    file = assets.folder / name
    file.unlink()
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "device":
        file.symlink_to("/dev/zero")
    elif kind == "folder":
        file.mkdir()
    else:
        file.write_text(json.dumps({"a": "b" * 2**16}))
    problem = {"large": "[Errno 27] expected at most 65,536 bytes", "folder": "[Errno 21] Is a directory"}
    reason = problem.get(kind, "[Errno 22] expected a regular file")
    line = rejection(lambda: HuggingFaceTokenizer(assets.folder))
    assert line == f"model.hf_assets_path: {assets.folder} cannot be read as a tokenizer: {reason}: '{file}'"
