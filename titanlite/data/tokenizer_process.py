"""A Hugging Face tokenizer in a worker process (worker.py), and further workers that tokenize shards."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from titanlite.config.loader import show
from titanlite.data.files import Segment, place
from titanlite.data.hf_tokenizer import HuggingFaceTokenizer, Tokens
from titanlite.data.shard_builder import CacheOptions, build_shard
from titanlite.data.token_shards import DType, Shard
from titanlite.data.tokenizer import Tokenizer
from titanlite.data.worker import THREADS, Worker, send
from titanlite.launch.process import available_cores


class ShardWorker(Worker):
    def build_shard(self, *arguments: Any) -> Shard:
        """Build a shard in this worker process. `arguments`: as for shard_builder.build_shard, up to `report`."""
        *of_shard, options, report = arguments
        at = "", 0

        def received(kind: str, *content: Any) -> None:
            nonlocal at
            if kind == "report":
                report(*content)
            else:
                at = content

        where = {"where": lambda: f" at {place(options.source.training, *at)}, or near it"}
        return self.call(_build_and_send, *of_shard, options, **where, received=received)


class TokenizerProcess(ShardWorker, HuggingFaceTokenizer):
    def __init__(self, path: Path):
        Worker.__init__(self, str(path))
        self.prefix, self.suffix, self.eos, self.vocab_size, self.identity = self.call(_properties)

    def encode_chunks(self, chunks: list[str], special: bool) -> list[Tokens]:
        at = f" at the text {show(chunks[0][:40])}, or shortly after it"
        return self.call(HuggingFaceTokenizer.encode_chunks, chunks, special, where=lambda: at)

    def decode(self, tokens: list[int]) -> str:
        return self.call(HuggingFaceTokenizer.decode, tokens)

    @contextlib.contextmanager
    def workers(self, n_shards: int) -> Iterator[list[ShardWorker]]:
        """Yield workers that build shards: several with THREADS cores each or (one shard, few cores) this tokenizer."""
        n_workers = min(n_shards, available_cores() // THREADS)
        with contextlib.ExitStack() as stack:
            workers = (contextlib.closing(ShardWorker(self.path)) for _ in range(n_workers) if n_workers > 1)
            yield [stack.enter_context(worker) for worker in workers] or [self]


def _properties(tokenizer: Any) -> tuple[list[int], list[int], int, int, str]:
    return tokenizer.prefix, tokenizer.suffix, tokenizer.eos, tokenizer.vocab_size, tokenizer.identity


def _build_and_send(
    tokenizer: Tokenizer, path: Path, dtype: DType, number: int, segments: list[Segment], options: CacheOptions
) -> Shard:
    of_shard = path, dtype, number, segments, options
    return build_shard(*of_shard, lambda *counts: send("report", counts), tokenizer, lambda *row: send("at", row))
