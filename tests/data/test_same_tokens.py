"""Token ids are those of transformers, for kinds of tokenizers, texts, long texts, prompts and conversations.

verification/same_tokens.py has all of them; a few run every time.
"""

from collections import Counter

import numpy as np
import pytest

from titanlite.data import hf_tokenizer
from titanlite.data.hf_tokenizer import HuggingFaceTokenizer
from verification import same_tokens

ALWAYS = [
    "byte-level BPE, two tokens before",
    "Prepend, BOS",
    "Metaspace first",
    "Unigram",
    "WordPiece",
    "added tokens, lstrip and rstrip, Prepend",
    "split_special_tokens",
]


@pytest.fixture
def short_chunks(monkeypatch) -> None:
    monkeypatch.setattr(hf_tokenizer, "CHUNK", 1000)
    monkeypatch.setattr(hf_tokenizer, "OVERLAP", 400)


def counted(names: list[str], folder, **options) -> Counter:
    kinds = {name: same_tokens.KINDS[name] for name in names}
    results = list(same_tokens.sweep(kinds, folder, 4000, **options))
    assert [(kind, case) for kind, case in results if case[1] is False] == []
    return Counter(name.partition(",")[0] for _, (name, is_equal, _) in results if is_equal)


@pytest.mark.parametrize("name", ALWAYS)
def test_tokens_are_those_of_transformers(tmp_path, short_chunks, name):
    equal = counted([name], tmp_path, templates=["ChatML, generation", "[INST]", "reasoning of the last turn"])
    assert equal["text"] > 20
    assert equal["prompt"] > 10
    assert equal["long text"] == 6
    assert equal["conversation"] > 35
    assert equal["mask"] > 30


@pytest.mark.nightly
@pytest.mark.parametrize("name", same_tokens.KINDS)
def test_all_kinds(tmp_path, short_chunks, name):
    counted([name], tmp_path)


def test_chunks_that_do_not_agree_are_encoded_together(tmp_path, short_chunks, monkeypatch):
    """A run of unknown characters is one token, so no joint is within it."""
    same_tokens.write(tmp_path, same_tokens.KINDS["Metaspace, unknown tokens"])
    own, text = HuggingFaceTokenizer(tmp_path), "word " * 300 + "東" * 2500 + " word" * 300
    chunks, encode = list[int](), HuggingFaceTokenizer.encode_chunks

    def encode_chunks(self, parts: list[str], special: bool) -> list[np.ndarray]:
        chunks.extend(map(len, parts))
        return encode(self, parts, special)

    monkeypatch.setattr(HuggingFaceTokenizer, "encode_chunks", encode_chunks)
    assert own.encode([text])[0].tolist() == own.loaded(text)["input_ids"]
    assert max(chunks) > 3000
    assert max(chunks) < len(text), "not more than is needed"


def test_a_joint_where_tokens_differ_is_found():
    tokens = np.arange(100, dtype=np.uint32)
    chunks, shared = [tokens[:60], tokens[40:]], [tokens[40:60]]
    assert hf_tokenizer.join(chunks, shared)[0].tolist() == tokens.tolist()
    for chunk, index in ((0, -1), (0, -14), (1, 0), (1, 14)):
        wrong = [own.copy() for own in chunks]
        wrong[chunk][index] += 1
        assert hf_tokenizer.join(wrong, shared)[1] == [1]
