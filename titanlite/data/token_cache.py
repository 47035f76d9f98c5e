"""The token cache: a dataset is tokenized once, into flat files that every later run memory-maps."""

import hashlib
import json
import shutil
import tempfile
import time
from pathlib import Path

import numpy as np
import torch.distributed as dist

from titanlite.config.loader import ConfigError, show
from titanlite.data.documents import Documents
from titanlite.data.tokenizer import Tokenizer, encode_documents
from titanlite.progress import progress

FORMAT = 3  # of the cache's files; raised when their names or their content change, so that they are built again


def is_validation_document(document: int, fraction: float) -> bool:
    """Return whether the document with this index belongs to the validation split: a fraction of the documents, evenly
    spaced over their order, and the same for every seed and number of ranks."""
    return int((document + 1) * fraction) > int(document * fraction)


def open_token_cache(
    documents: Documents, tokenizer: Tokenizer, validation_fraction: float, *, cache_folder: str, builds_cache: bool
) -> tuple[np.ndarray, np.ndarray, str]:
    """Return the tokens of the training and the validation split, memory-mapped, and a hash of the former: equal hashes
    mean equal tokens, wherever the documents came from.

    A missing cache is built by the rank with `builds_cache`, and the other ranks of its node wait for it. A folder that
    cannot be written raises ConfigError.
    """
    options = f"{FORMAT}/{documents.fingerprint}/{tokenizer.identity}/{validation_fraction}"
    folder = Path(cache_folder).expanduser() / hashlib.sha256(options.encode()).hexdigest()[:32]
    if builds_cache and not folder.exists():
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            unfinished = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", suffix=".tmp", dir=folder.parent))
        except OSError as error:
            problem = f"training.cache_folder = {show(cache_folder)}: cannot be written: {error.strerror}"
            raise ConfigError([problem]) from None
        try:
            _build(unfinished, documents, tokenizer, validation_fraction)
            unfinished.rename(folder)
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            if not folder.exists():  # another node that shares the folder may have been first
                raise
    reports = dist.get_node_local_rank(fallback_rank=1) == 1  # one of the waiting ranks
    with progress("waiting until another rank has built the token cache", enabled=reports):
        while not folder.exists():  # no collective: tokenizing may take longer than its timeout
            time.sleep(0.1)
    summary = json.loads((folder / "tokens.json").read_text())
    train, validation = (_memory_map(folder / f"{split}.bin", summary["dtype"]) for split in ("train", "validation"))
    return train, validation, summary["sha256"]


def _memory_map(file: Path, dtype: str) -> np.ndarray:
    """Return a file as a flat array that is read when it is used. An empty file cannot be memory-mapped."""
    return np.memmap(file, dtype=dtype, mode="r") if file.stat().st_size else np.empty(0, dtype=dtype)


def _build(folder: Path, documents: Documents, tokenizer: Tokenizer, validation_fraction: float) -> None:
    """Tokenize all documents into the files of a folder, and report the progress."""
    dtype = "uint16" if tokenizer.vocab_size <= 2**16 else "uint32"
    content = hashlib.sha256(f"{tokenizer.bos}/{tokenizer.eos}/".encode())
    n_documents, n_tokens, n_bytes, begin = 0, 0, 0, time.monotonic()
    with (
        open(folder / "train.bin", "wb") as train,
        open(folder / "validation.bin", "wb") as validation,
        progress("building the token cache", total=documents.count, unit="documents") as advance,
    ):
        for texts in documents.batches():
            for tokens in encode_documents(tokenizer, texts):
                encoded = tokens.astype(dtype).tobytes()
                if is_validation_document(n_documents, validation_fraction):
                    validation.write(encoded)
                else:
                    train.write(encoded)
                    content.update(encoded)
                n_documents, n_tokens = n_documents + 1, n_tokens + len(tokens)
            n_bytes += sum(len(text.encode("utf-8", "surrogatepass")) for text in texts)
            rate = n_bytes / 1e6 / (time.monotonic() - begin)
            advance(len(texts), f"{n_tokens:,} tokens, {rate:.1f} MB/s of text")
    summary = {"dtype": dtype, "documents": n_documents, "tokens": n_tokens, "sha256": content.hexdigest()}
    (folder / "tokens.json").write_text(json.dumps(summary))
