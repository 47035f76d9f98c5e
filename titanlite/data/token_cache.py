"""The token cache: a dataset is tokenized once, into flat files that every later run memory-maps."""

import contextlib
import hashlib
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch.distributed as dist
import xxhash

from titanlite.config.loader import ConfigError, show
from titanlite.data import token_files
from titanlite.data.documents import Documents
from titanlite.data.token_files import FILES, DamagedCacheError, Split, Summary
from titanlite.data.tokenizer import Tokenizer, encode_documents
from titanlite.progress import alive, mark, progress
from titanlite.reliability.files import sync, sync_folder
from titanlite.reliability.folder_lock import FolderInUse, FolderLock


def is_validation_document(document: int, fraction: float) -> bool:
    """Return whether the document with this index belongs to the validation split: a fraction of the documents, evenly
    spaced over their order, and the same for every seed and number of ranks."""
    return int((document + 1) * fraction) > int(document * fraction)


def open_token_cache(
    documents: Documents, tokenizer: Tokenizer, validation_fraction: float, *, cache_folder: str, builds_cache: bool
) -> tuple[np.ndarray, np.ndarray, str]:
    """Return the tokens of the training and the validation split, memory-mapped, and a hash of the former: equal hashes
    mean equal tokens, wherever the documents came from.

    A missing or damaged cache is built by the rank with `builds_cache`, and the other ranks of its node wait for it.
    Every rank must call it. Raises ConfigError for a folder that cannot be written or is not to be trusted, and for
    documents that change meanwhile.
    """
    options = f"{token_files.FORMAT}/{documents.fingerprint}/{tokenizer.identity}/{validation_fraction}"
    folder = Path(cache_folder).expanduser() / hashlib.sha256(options.encode()).hexdigest()[:32]
    _check_that_ranks_agree(documents, folder.name, builds_cache)
    mark("the token cache", limited=builds_cache)  # its builder reports progress, and the others wait
    if not builds_cache:
        _wait(folder, tokenizer)
    elif _problem(folder, tokenizer):
        _build_alone(folder, documents, tokenizer, validation_fraction, f"training.cache_folder = {show(cache_folder)}")
    try:
        summary = token_files.read_summary(folder, tokenizer.vocab_size)
    except (DamagedCacheError, OSError) as error:  # since it was verified
        raise ConfigError([f"token cache {folder}: was changed while the run started: {error}"]) from None
    train, validation = (_memory_map(folder / file, summary.dtype) for file in FILES.values())
    return train, validation, summary.sha256


def _memory_map(file: Path, dtype: str) -> np.ndarray:
    """Return a file as a flat array that is read when it is used. An empty file cannot be memory-mapped."""
    return np.memmap(file, dtype=dtype, mode="r") if file.stat().st_size else np.empty(0, dtype=dtype)


def _check_that_ranks_agree(documents: Documents, key: str, builds_cache: bool) -> None:
    """Compare the key of the token cache with that of the rank that builds it. A rank that found other documents, as
    when a file changes meanwhile, would wait for another cache forever. Nodes may have files, and so keys, of their
    own: build.build_data compares their tokens."""
    if not dist.is_initialized():
        return
    found: list[tuple[str, bool]] = [("", False)] * dist.get_world_size()
    dist.all_gather_object(found, (key, builds_cache))
    builder = 0
    for rank, (other, builds) in enumerate(found):
        builder = rank if builds else builder  # the first rank of each node, and a node's ranks are consecutive
        if other != found[builder][0]:
            problem = f"{documents.source}: rank {rank} read other documents than rank {builder} of its node: a file "
            raise ConfigError([problem + "changed meanwhile; start again when nothing writes them"])


def _wait(folder: Path, tokenizer: Tokenizer) -> None:
    """Wait until the rank that builds the token cache has built or verified it."""
    reports = dist.get_node_local_rank(fallback_rank=1) == 1  # one of the waiting ranks
    with progress("waiting until another rank has built the token cache", enabled=reports):
        while not token_files.is_verified(folder):  # no collective: tokenizing may take longer than its timeout
            if folder.exists() and not os.access(folder, os.W_OK):  # the other rank cannot leave its record there
                problem = _problem(folder, tokenizer)
                if problem:
                    raise ConfigError([f"token cache {folder}: {problem}"])
                return
            time.sleep(0.5)


def _problem(folder: Path, tokenizer: Tokenizer) -> str:
    """Return why the token cache must be built: "missing", or how it is damaged; "" if it need not be. Its checksums
    are verified once, and again when a file has changed since. Raises ConfigError if it is not to be trusted."""
    try:
        summary = token_files.read_summary(folder, tokenizer.vocab_size)
        if not token_files.is_verified(folder):
            size = summary.train.bytes + summary.validation.bytes
            with progress("verifying the token cache", total=size, unit="bytes") as advance:
                token_files.verify(folder, summary, advance)
            with contextlib.suppress(OSError):  # a folder that this user cannot write is verified by every run
                token_files.write_verified(folder)
        return ""
    except FileNotFoundError:
        return "missing"
    except DamagedCacheError as error:
        return str(error)
    except OSError as error:
        return f"cannot be read: {error.strerror}"


def _build_alone(
    folder: Path, documents: Documents, tokenizer: Tokenizer, validation_fraction: float, option: str
) -> None:
    """Build a token cache while no other run builds it, in a folder that is renamed once complete. If another run was
    first, its cache is used; what a killed one left is removed. `option` names the cache folder in messages."""
    unfinished = folder.with_name(f"{folder.name}.tmp")
    lock = FolderLock(
        folder.parent,
        name=f"{folder.name}.lock",
        purpose=option,
        advice="this run waits until it has built the token cache",
        lost=lambda message: None,  # is_held() is asked before anything of another run could be touched
    )
    _acquire(lock)
    try:
        problem = _problem(folder, tokenizer)
        if not problem:
            return
        if problem != "missing":
            print(f"token cache {folder}: {problem}; it is removed and built again", flush=True)
        for left in (folder, unfinished):
            _remove(left)
        unfinished.mkdir(mode=0o755)  # others may read it, as far as the umask allows, and not write
        token_files.check_trusted(unfinished)  # some file systems do not keep owners or permissions
        _build(unfinished, documents, tokenizer, validation_fraction, lock.is_held)
        sync_folder(unfinished)
        unfinished.rename(folder)
        token_files.write_verified(folder)
    except OSError as error:
        raise ConfigError([f"{option}: cannot be written: {error.strerror}"]) from None
    finally:
        if lock.is_held():
            shutil.rmtree(unfinished, ignore_errors=True)
        lock.release()


def _acquire(lock: FolderLock) -> None:
    """Acquire a lock, and wait while it is in use."""
    try:
        lock.acquire()
        return
    except FolderInUse as error:
        description = error.problems[0]
    with progress(description):
        while True:
            time.sleep(0.5)
            alive()
            with contextlib.suppress(FolderInUse):
                lock.acquire()
                return


def _remove(path: Path) -> None:
    """Remove a file, or a folder with what is in it, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


class _SplitWriter:
    """Writes the file of one split."""

    def __init__(self, file: BinaryIO):
        self.file, self.checksum, self.bytes, self.largest = file, xxhash.xxh3_64(), 0, -1

    def write(self, encoded: bytes, largest: int) -> None:
        self.file.write(encoded)
        self.checksum.update(encoded)
        self.bytes, self.largest = self.bytes + len(encoded), max(self.largest, largest)

    def finish(self) -> Split:
        """Return what tokens.json says of the split, once its bytes are on the disk."""
        sync(self.file)
        return Split(bytes=self.bytes, xxh3_64=self.checksum.hexdigest(), largest_token=self.largest)


def _create(path: str, flags: int) -> int:
    return os.open(path, flags, 0o644)  # by default the umask decides whether the group may write


def _build(
    folder: Path, documents: Documents, tokenizer: Tokenizer, validation_fraction: float, is_held: Callable[[], bool]
) -> None:
    """Tokenize all documents into the files of a folder, and report the progress. `is_held` returns whether this
    process may still write them."""
    dtype = token_files.dtype_for(tokenizer.vocab_size)
    content = hashlib.sha256(f"{tokenizer.bos}/{tokenizer.eos}/".encode())
    n_documents, n_tokens, n_bytes, begin = 0, 0, 0, time.monotonic()
    with (
        open(folder / FILES["train"], "xb", opener=_create) as train_file,
        open(folder / FILES["validation"], "xb", opener=_create) as validation_file,
        progress("building the token cache", total=documents.count, unit="documents") as advance,
    ):
        train, validation = _SplitWriter(train_file), _SplitWriter(validation_file)
        for texts in documents.batches():
            for tokens in encode_documents(tokenizer, texts):
                encoded, largest = tokens.astype(dtype).tobytes(), int(tokens.max())
                if is_validation_document(n_documents, validation_fraction):
                    validation.write(encoded, largest)
                else:
                    train.write(encoded, largest)
                    content.update(encoded)
                n_documents, n_tokens = n_documents + 1, n_tokens + len(tokens)
            n_bytes += sum(len(text.encode("utf-8", "surrogatepass")) for text in texts)
            rate = n_bytes / 1e6 / (time.monotonic() - begin)
            advance(len(texts), f"{n_tokens:,} tokens, {rate:.1f} MB/s of text")
        summary = Summary(
            dtype=dtype,
            documents=n_documents,
            tokens=n_tokens,
            sha256=content.hexdigest(),
            train=train.finish(),
            validation=validation.finish(),
        )
    if not is_held():
        raise ConfigError([f"{folder}: another run took over the token cache while this process was suspended"])
    with open(folder / token_files.TOKENS, "xb", opener=_create) as file:
        file.write(summary.encode())
        sync(file)
