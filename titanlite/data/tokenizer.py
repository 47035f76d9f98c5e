"""Tokenizers from text to token ids and back: their common interface, and the tokenizer of bytes."""

import contextlib
import signal
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np

from titanlite.config.loader import ConfigError, show

BATCH = 2**20  # number of characters in a batch of texts, which are encoded together
SECONDS = 10  # maximum processor time, in seconds, that a worker may spend on a batch or a conversation


def restart_time_limit() -> None:
    """Restart the time limit of a worker, if this process is a worker."""
    if signal.getitimer(signal.ITIMER_PROF)[0]:
        signal.setitimer(signal.ITIMER_PROF, SECONDS)


class Rows(NamedTuple):
    """The number of rows in a model's embedding, which exceeds every valid token id."""

    n: int
    option: str  # option that sets the number, for error messages, such as "model.vocab_size = 320"
    advice: str

    def require(self, text: str, tokens: np.ndarray | list[int]) -> None:
        """Raise ConfigError if a text has a token without a row."""
        if (largest := int(np.max(tokens, initial=0))) >= self.n:
            problem = f"{self.option}: {show(text[:40])} has the token {largest}: expected ids below {self.n}"
            raise ConfigError([f"{problem}; {self.advice}"])


class Tokenizer(Protocol):
    """Converts text to token ids and back."""

    rows: Rows | None = None
    """The rows of the model's embedding; a text with a token id that has no row is an error."""
    prefix: list[int]
    """The tokens that begin each text, such as BOS."""
    suffix: list[int]
    """The tokens that end each text, in addition to the EOS of documents."""
    eos: int
    vocab_size: int
    identity: str
    path: str

    @property
    def bos(self) -> int | None:
        return next(iter(self.prefix), None)

    def encode(self, texts: list[str], special: bool = False) -> list[np.ndarray]:
        """Return each text's token ids, uint32, without prefix and suffix. `special`: encode special tokens as such."""

    def decode(self, tokens: list[int]) -> str:
        """Return the text of tokens. Special tokens have no text."""

    def fit(self, rows: Rows) -> "Tokenizer":
        """Set this tokenizer's `rows`, and return it. Raises ConfigError if the model has no row for BOS or EOS."""
        self.rows = rows
        rows.require("BOS", self.prefix)
        rows.require("EOS", [self.eos])
        return self

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function with this tokenizer and `arguments`, in the tokenizer's process."""
        return function(self, *arguments)

    @contextlib.contextmanager
    def workers(self, n_shards: int) -> Iterator[list[Any]]:
        """Yield processes that build shards of a token cache with this tokenizer; [] if this process builds them."""
        yield []


class ByteTokenizer(Tokenizer):
    """Makes every byte of UTF-8 a token; 256 is BOS and 257 is EOS."""

    prefix, suffix, eos, vocab_size = [256], list[int](), 257, 258
    identity, path = "bytes", ""

    def encode(self, texts: list[str], special: bool = False) -> list[np.ndarray]:
        # surrogatepass encodes lone surrogates, which a broken text may contain, as bytes.
        encoded = (text.encode("utf-8", "surrogatepass") for text in texts)
        return [np.frombuffer(text, dtype=np.uint8).astype(np.uint32) for text in encoded]

    def decode(self, tokens: list[int]) -> str:
        """Return the text of tokens, with replacement characters for broken UTF-8."""
        return bytes(token for token in tokens if token < 256).decode("utf-8", "replace")


def encode_documents(tokenizer: Tokenizer, texts: list[str], special: bool = False) -> list[np.ndarray]:
    """Return documents' token ids, uint32, with prefix, suffix and EOS; if `special`, only those that a text lacks."""
    begin, end = tokenizer.prefix, tokenizer.suffix
    end = end if end[-1:] == [tokenizer.eos] else [*end, tokenizer.eos]
    documents = []
    for tokens in tokenizer.encode(texts, special):
        before = [] if special and tokens[: len(begin)].tolist() == begin else begin
        after = [] if special and tokens[-len(end) :].tolist() == end else end
        documents.append(np.concatenate([np.array(before, np.uint32), tokens, np.array(after, np.uint32)]))
    return documents


def encode_prompts(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    """Return the tokens of each prompt. Raises ConfigError for an empty prompt, or a token that the model lacks."""
    prompts = [[*tokenizer.prefix, *tokens.tolist(), *tokenizer.suffix] for tokens in tokenizer.encode(texts)]
    for text, prompt in zip(texts, prompts, strict=True):
        if not prompt:
            raise ConfigError([f"prompt {show(text)}: has no tokens, and the tokenizer adds none; give it some text"])
        if tokenizer.rows:
            tokenizer.rows.require(text, prompt)
    return prompts


def continuation(tokenizer: Tokenizer, prompt: list[int], tokens: list[int]) -> str:
    """Return the text of the tokens after a prompt. Decode them with the prompt: decoders may drop a first space."""
    return tokenizer.decode([*prompt, *tokens])[len(tokenizer.decode(prompt)) :]
