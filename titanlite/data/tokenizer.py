"""Tokenizers, from text to token ids: what each has, and the one that a run on bytes has."""

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np


class Tokenizer(Protocol):
    """Makes token ids of text."""

    bos: int | None
    eos: int
    vocab_size: int
    identity: str
    path: str

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """Return the token ids of each text, uint32, without BOS and EOS."""

    def decode(self, tokens: list[int]) -> str:
        """Return the text of tokens. Special tokens have none."""

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return what a function of the tokenizer returns, from the process that the tokenizer runs in."""
        return function(self, *arguments)


class ByteTokenizer(Tokenizer):
    """Makes every byte of UTF-8 a token; 256 is BOS and 257 is EOS."""

    bos, eos, vocab_size = 256, 257, 258
    identity, path = "bytes", ""

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        # surrogatepass: a text with a broken character is still bytes
        encoded = (text.encode("utf-8", "surrogatepass") for text in texts)
        return [np.frombuffer(text, dtype=np.uint8).astype(np.uint32) for text in encoded]

    def decode(self, tokens: list[int]) -> str:
        """Return the text of tokens; broken UTF-8 has replacement characters."""
        return bytes(token for token in tokens if token < 256).decode("utf-8", "replace")


def encode_documents(tokenizer: Tokenizer, texts: list[str]) -> list[np.ndarray]:
    """Return the token ids of each document, uint32: BOS (if the tokenizer has one), the text, EOS."""
    bos = np.array([] if tokenizer.bos is None else [tokenizer.bos], np.uint32)
    eos = np.array([tokenizer.eos], np.uint32)
    return [np.concatenate([bos, tokens, eos]) for tokens in tokenizer.encode(texts)]
