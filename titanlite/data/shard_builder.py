"""Tokenize some segments of a dataset into a shard of the token cache, in this process or in another.

python -m titanlite.data.shard_builder        started by WorkerProcess: one JSON object on each line of stdin and
                                              stdout; it ends with its parent, when stdin does
"""

import contextlib
import dataclasses
import functools
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from titanlite.config.loader import ConfigError
from titanlite.config.schema import Training
from titanlite.data.documents import read_documents
from titanlite.data.files import END, Segment
from titanlite.data.shard_files import write_shard
from titanlite.data.source import Source
from titanlite.data.token_shards import DType, Shard, Split
from titanlite.data.tokenizer import BATCH, Tokenizer, build_tokenizer, encode_documents
from titanlite.errors import TrainingError

Report = Callable[[int, int], None]
"""Is called with the bytes of the dataset's files and the tokens since the last call."""


@dataclasses.dataclass(frozen=True)
class Work:
    """What the shards of a token cache are made of."""

    training: Training
    path_option: str
    hf_assets_path: str
    validation_fraction: float


def is_validation_document(shard: int, document: int, fraction: float) -> bool:
    """Return whether a document of a shard, counted from 0, belongs to the validation split: a fraction of the
    documents, evenly spaced over the shard, and the same for every seed and number of ranks. Shards begin at different
    phases, so that shards of few documents have the fraction together."""
    phase = shard * 0.6180339887498949 % 1  # the golden ratio: any number of shards spread evenly
    return int(phase + (document + 1) * fraction) > int(phase + document * fraction)


def chat_template_of(training: Training, tokenizer: Tokenizer) -> Any:
    """Return the ChatTemplate of fine-tuning data, None for text. Raises ConfigError if the tokenizer has none."""
    if training.dataset_format == "text":
        return None
    from titanlite.data.chat_template import ChatTemplate  # here, since text needs none

    return ChatTemplate(tokenizer)


def build_shard(
    path: Path, dtype: DType, number: int, segments: list[Segment], work: Work, tokenizer: Tokenizer, report: Report
) -> Shard:
    """Tokenize segments into a new file. Raises ConfigError or TrainingError for what cannot be read."""
    source, template = Source(work.training, work.path_option), chat_template_of(work.training, tokenizer)
    encode: Callable[[list[Any]], list[np.ndarray]] = functools.partial(encode_documents, tokenizer)
    document_of: Callable[[dict[str, Any]], str] | None = None
    if template:
        encode = functools.partial(template.encode, dtype=dtype)
        document_of = functools.partial(template.document, work.training)

    def encoded() -> Iterator[tuple[list[str], list[np.ndarray], int]]:
        """Yield texts, their tokens, and the bytes of the files that were read; two batches are encoded at a time, so
        that the library's threads always have work."""
        with ThreadPoolExecutor(2) as pool:
            running: list[Any] = []
            for texts, n_bytes in _batches(source, segments, document_of):
                running.append((texts, pool.submit(encode, texts), n_bytes))
                if len(running) > 2:
                    texts, future, n_bytes = running.pop(0)
                    yield texts, future.result(), n_bytes
            for texts, future, n_bytes in running:
                yield texts, future.result(), n_bytes

    def documents() -> Iterator[tuple[Split, np.ndarray, int]]:
        document = 0
        for texts, tokens, n_bytes in encoded():
            for text, own in zip(texts, tokens, strict=True):
                is_validation = is_validation_document(number, document, work.validation_fraction)
                size = len(text) if text.isascii() else len(text.encode())
                yield "validation" if is_validation else "train", own, size
                document += 1
            report(n_bytes, sum(map(len, tokens)))

    return write_shard(path, dtype, documents())


def _batches(source: Source, segments: list[Segment], document_of: Any) -> Iterator[tuple[list[str], int]]:
    """Yield texts of BATCH characters or more together, and how many bytes of the files they are, about."""
    texts, size, n_bytes = list[str](), 0, 0.0
    for segment in segments:
        position = segment.begin
        per_row = segment.bytes / max(segment.end - segment.begin, 1) if segment.end < END else 0
        for end, text in read_documents(source, segment, document_of):
            texts.append(text)
            size += len(text)
            n_bytes += (end - position) * per_row
            position = end
            if size >= BATCH:
                yield texts, round(n_bytes)
                texts, size, n_bytes = [], 0, 0
        n_bytes += 0 if per_row else segment.bytes
    if texts:
        yield texts, round(n_bytes)


class InProcess:
    """Builds shards in this process, with the tokenizer's threads on all cores."""

    def __init__(self, work: Work, tokenizer: Tokenizer):
        self.work, self.tokenizer = work, tokenizer

    def build(self, path: Path, dtype: DType, number: int, segments: list[Segment], report: Report) -> Shard:
        return build_shard(path, dtype, number, segments, self.work, self.tokenizer, report)

    def close(self) -> None:
        pass


class WorkerProcess:
    """Builds shards in a process of its own, which ends when this one does."""

    def __init__(self, work: Work, *, threads: int):
        command = [sys.executable, "-m", "titanlite.data.shard_builder"]
        environment = {**os.environ, "RAYON_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "true"}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
        )
        self._send({**dataclasses.asdict(work), "training": work.training.model_dump(mode="json")})

    def _send(self, message: dict[str, Any]) -> None:
        assert self.process.stdin
        with contextlib.suppress(BrokenPipeError):  # `build` sees that the process has ended
            self.process.stdin.write(json.dumps(message) + "\n")
            self.process.stdin.flush()

    def build(self, path: Path, dtype: DType, number: int, segments: list[Segment], report: Report) -> Shard:
        """Build a shard. Raises TrainingError if the process ends meanwhile."""
        assert self.process.stdout
        self._send({"path": str(path), "dtype": dtype, "number": number, "segments": segments})
        for line in self.process.stdout:
            message = json.loads(line)
            if "shard" in message:
                return Shard.model_validate(message["shard"])
            if "problems" in message:
                raise ConfigError(message["problems"])
            if "error" in message:
                raise TrainingError(message["error"])
            report(*message["report"])
        status = self.process.wait()
        raise TrainingError(f"a process that tokenizes ended with status {status}; perhaps the memory was too small")

    def close(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()  # type: ignore[union-attr]


def main() -> None:
    """Build shards, as the parent asks for them."""
    lines: Any = iter(sys.stdin.readline, "")
    options = json.loads(next(lines))
    work = Work(**{**options, "training": Training.model_validate(options["training"])})
    tokenizer = build_tokenizer(work.hf_assets_path)
    jobs: Any = []
    arrived = threading.Semaphore(0)

    def read() -> None:
        for line in lines:
            jobs.append(json.loads(line))
            arrived.release()
        os._exit(1)  # the parent has ended

    def send(message: dict[str, Any]) -> None:
        print(json.dumps(message), flush=True)

    threading.Thread(target=read, daemon=True).start()
    while True:
        arrived.acquire()
        job = jobs.pop(0)
        segments = [Segment(*segment) for segment in job["segments"]]
        arguments = (Path(job["path"]), job["dtype"], job["number"], segments, work, tokenizer)
        try:
            shard = build_shard(*arguments, lambda n_bytes, n_tokens: send({"report": [n_bytes, n_tokens]}))
            send({"shard": shard.model_dump()})
        except ConfigError as error:
            send({"problems": error.problems})
        except (TrainingError, OSError) as error:
            send({"error": str(error)})


if __name__ == "__main__":
    main()
