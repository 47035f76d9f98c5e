"""An own dataset: sums such as 27+58=85, made from the index of a sequence; nothing is read, and nothing is stored.

titanlite train debug --own examples/own/arithmetic.py:own
"""

import numpy as np

from titanlite import Own

SYMBOLS = "0123456789+=\n"


class Sums:
    """Sequences of T + 1 tokens. The same index gives the same sums, on any rank and after a restart."""

    def __init__(self, seq_len: int, seed: int, stream: int = 0):
        self.seq_len, self.seed, self.stream = seq_len, seed, stream

    def __getitem__(self, index: int) -> np.ndarray:
        a, b = np.random.default_rng((self.seed, self.stream, index)).integers(0, 100, (2, self.seq_len // 4 + 1))
        text = "".join(f"{x}+{y}={x + y}\n" for x, y in zip(a, b, strict=True))
        return np.array([SYMBOLS.index(symbol) for symbol in text[: self.seq_len + 1]])


class Validation(Sums):
    def __len__(self) -> int:
        return 64


def data(training, vocab_size: int, seed: int) -> Sums:
    """Return the training split, with a validation split of other sums."""
    sums = Sums(training.seq_len, seed)
    sums.validation = Validation(training.seq_len, seed, stream=1)
    return sums


own = Own(data=data)
