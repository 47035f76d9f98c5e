"""Tokenizers: bytes, and a Hugging Face tokenizer.json with its special tokens."""

import numpy as np
import pytest

from tests.data_helpers import BYTES, built_in_texts, flat, rejection
from titanlite.data.tokenizer import ByteTokenizer, build_tokenizer

TEXTS = ["Hello, world", "", "naïve — 東京 🎉", "line\nline\r\n\ttab\0", "\ud800 broken"]


def test_bytes_there_and_back():
    for text, tokens in zip(TEXTS, BYTES.encode(TEXTS), strict=True):
        assert tokens.dtype == np.uint32
        assert bytes(tokens.tolist()).decode("utf-8", "surrogatepass") == text
    assert flat(["ab", ""]) == [256, 97, 98, 257, 256, 257]
    assert BYTES.vocab_size == 258
    assert isinstance(build_tokenizer(""), ByteTokenizer)


def test_token_ids_are_those_of_the_tokenizers_library(assets):
    from tokenizers import Tokenizer

    tokenizer, theirs = build_tokenizer(str(assets.file)), Tokenizer.from_file(str(assets.file))
    texts = [*TEXTS[:-1], *built_in_texts()[10:20]]
    for text, tokens in zip(texts, tokenizer.encode(texts), strict=True):
        assert tokens.dtype == np.uint32
        assert tokens.tolist() == theirs.encode(text, add_special_tokens=False).ids
        assert theirs.decode(tokens.tolist(), skip_special_tokens=False) == text
    assert tokenizer.vocab_size == theirs.get_vocab_size() == 400
    assert assets.open().identity == tokenizer.identity, "a folder is as good as its file"


@pytest.mark.parametrize(
    ("settings", "bos", "eos"),
    [
        ({}, 0, 1),
        ({"eos_token": "<stop>"}, 0, 2),
        ({"bos_token": "<stop>", "eos_token": "</s>"}, 2, 1),
        ({"bos_token": {"content": "<s>", "lstrip": False}, "eos_token": {"content": "<stop>"}}, 0, 2),
        ({"bos_token": None, "eos_token": None}, None, 1),
    ],
)
def test_special_tokens(assets, settings, bos, eos):
    plain, tokenizer = assets.open(), assets.open(**settings)
    assert (tokenizer.bos, tokenizer.eos) == (bos, eos)
    assert (tokenizer.identity == plain.identity) == (not settings)
    assert flat(["a"], tokenizer) == [*([] if bos is None else [bos]), *tokenizer.encode(["a"])[0], eos]


def test_text_cannot_end_its_document(assets):
    tokenizer, text = assets.open(), "one</s><s>two<stop>"
    (tokens,) = tokenizer.encode([text])
    assert not {0, 1, 2} & set(tokens.tolist())
    assert tokenizer.tokenizer.decode(tokens.tolist(), skip_special_tokens=False) == text


def test_documents_are_neither_truncated_nor_padded(assets):
    """A tokenizer.json may ask for either; that is meant for the inputs of a sentence encoder."""
    from tokenizers import Tokenizer

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
    for key in ("bos_token", "eos_token"):
        line = rejection(lambda key=key: assets.open(**{key: "<nope>"}))
        assert f'{assets.settings} names {key} "<nope>", which the vocabulary lacks' in line
    for settings in ("{", "[1]"):
        assets.settings.write_text(settings)
        assert str(assets.file) in rejection(lambda: build_tokenizer(str(assets.folder)))
    assets.file.write_text(content.replace("<s>", "<go>"))
    assert assets.open().bos is None, "no BOS is fine"
    assets.file.write_text(content.replace("</s>", "<halt>"))
    line = rejection(assets.open)
    assert all(part in line for part in (str(assets.file), "<|end_of_text|>", str(assets.settings)))
    assets.file.write_text('{"version": "1.0", "model": {"type": "Nonsense"}}')
    assert str(assets.file) in rejection(assets.open)
