"""Tokenizers, from text to token ids: what each has, and the one that a run on bytes has."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np

from titanlite.config.loader import ConfigError, show


class Rows(NamedTuple):
    """How many rows the embedding of a model has: its tokens are the ids below."""

    n: int
    option: str
    """What has the number, for messages, as in "model.vocab_size = 320"."""
    advice: str

    def require(self, text: str, tokens: np.ndarray | list[int]) -> None:
        """Raise ConfigError if a text has a token without a row."""
        if (largest := int(np.max(tokens, initial=0))) >= self.n:
            problem = f"{self.option}: {show(text[:40])} has the token {largest}: expected ids below {self.n}"
            raise ConfigError([f"{problem}; {self.advice}"])


class Tokenizer(Protocol):
    """Makes token ids of text."""

    rows: Rows | None = None
    """Of the model that the tokens are for. The tokenizer may have more ids, which texts must not have then."""
    bos: int | None
    eos: int
    vocab_size: int
    identity: str
    path: str

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """Return the token ids of each text, uint32, without BOS and EOS."""

    def decode(self, tokens: list[int]) -> str:
        """Return the text of tokens. Special tokens have none."""

    def fit(self, rows: Rows) -> "Tokenizer":
        """Return this tokenizer for a model. Raises ConfigError if the model lacks a row for BOS or EOS."""
        self.rows = rows
        rows.require("BOS", [self.bos or 0])
        rows.require("EOS", [self.eos])
        return self

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
