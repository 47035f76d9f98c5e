"""The tokenizer of a Hugging Face tokenizer.json."""

import hashlib
import json
import re
import signal
from array import array
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import PlainSerializer, PlainValidator

from titanlite.config.loader import ConfigError, show
from titanlite.config.regular_file import read_file
from titanlite.data.tokenizer import Tokenizer

CHUNK, BATCH = 2**18, 2**20
"""Characters of a text, and of all texts, that are encoded at a time: the library takes some 200 bytes for each token
until then."""
SECONDS = 10
"""Processor time of a batch, or of a conversation, where it is limited."""
LARGEST_FILE = 2**27
"""Bytes of a file of a tokenizer."""
_FROM_JSON = PlainValidator(lambda text: np.frombuffer(bytearray.fromhex(str(text)), np.uint32))
Tokens = Annotated[np.ndarray, _FROM_JSON, PlainSerializer(lambda tokens: tokens.tobytes().hex())]
"""Token ids, uint32, which are hexadecimal in a message of a worker."""


def restart_time_limit() -> None:
    """Begin the time limit of a worker again."""
    if signal.getitimer(signal.ITIMER_PROF)[0]:
        signal.setitimer(signal.ITIMER_PROF, SECONDS)


def reason_of(error: BaseException) -> str:
    """Return what an error says, in one line."""
    return " ".join(str(error).split())[:300] or type(error).__name__


def split_text(text: str) -> list[str]:
    """Return a text in chunks of at most CHUNK characters: up to a line feed before anything but white space, so that
    byte-level BPE has the tokens of the text in one chunk; else up to a space, else anywhere."""
    chunks, begin = [], 0
    while len(text) - begin > CHUNK:
        chunk = text[begin : begin + CHUNK]
        ends = [match.end() for match in re.finditer(r"\n(?=\S)", chunk)]
        end = ends[-1] if ends else max(chunk.rfind(" "), 0) or CHUNK
        chunks.append(chunk[:end])
        begin += end
    return [*chunks, text[begin:]]


def special_token(name: str, settings: dict[str, Any], file: Path, known: tuple[str, ...], ids: dict[str, int]) -> Any:
    """Return the id of the token that the settings name, as a string or an object with its content; else that of the
    first known token in the vocabulary, `ids`; else None. Raise ConfigError if the named one is not in it."""
    token = settings.get(name)
    token = token.get("content") if isinstance(token, dict) else token
    if token is None:
        return next((ids[token] for token in known if token in ids), None)
    if str(token) not in ids:
        raise ConfigError([f"model.hf_assets_path: {file} names {name} {show(token)}, which the vocabulary lacks"])
    return ids[str(token)]


class HuggingFaceTokenizer(Tokenizer):
    """Encodes text by a tokenizer.json, which the `tokenizers` library runs on all cores.

    The special tokens BOS and EOS are those that the tokenizer_config.json beside it names, else those that well-known
    models use; without EOS it raises ConfigError. Special tokens that a text spells out are encoded as ordinary text,
    so a text cannot end its own document.
    """

    KNOWN_BOS = ("<|begin_of_text|>", "<s>", "<bos>")
    KNOWN_EOS = ("<|end_of_text|>", "</s>", "<|endoftext|>", "<eos>", "<|im_end|>")

    def __init__(self, path: Path):
        from tokenizers import Tokenizer  # here, since only a worker needs it

        self.path = str(path)
        file = self.file = path / "tokenizer.json" if path.is_dir() else path
        settings_file = file.parent / "tokenizer_config.json"
        try:
            self.tokenizer = Tokenizer.from_str(content := read_file(file, LARGEST_FILE).decode())
            settings = dict(json.loads(read_file(settings_file, LARGEST_FILE))) if settings_file.exists() else {}
            ids = self.tokenizer.get_vocab(with_added_tokens=True)
            known = {token.content for token in self.tokenizer.get_added_tokens_decoder().values() if token.special}
            named = dict(settings.get("added_tokens_decoder") or {}).values()  # tokenizer.json need not repeat them
            special = {token["content"] for token in named if token.get("special")} & ids.keys() - known
            self.tokenizer.add_special_tokens(added := sorted(special))
        except BaseException as error:  # `tokenizers` raises bare Exception, and its Rust code what is no Exception
            problem = f"model.hf_assets_path: {file} cannot be read as a tokenizer: {reason_of(error)}"
            raise ConfigError([problem]) from None
        self.tokenizer.encode_special_tokens = True
        self.tokenizer.no_truncation()  # a tokenizer.json may ask for both, for other uses than training
        self.tokenizer.no_padding()
        known_bos = () if "bos_token" in settings else self.KNOWN_BOS  # null: the model has none
        self.bos = special_token("bos_token", settings, settings_file, known_bos, ids)
        self.eos = special_token("eos_token", settings, settings_file, self.KNOWN_EOS, ids)
        if self.eos is None:
            problem = f"model.hf_assets_path: {file} has none of the known EOS tokens {', '.join(self.KNOWN_EOS)}"
            raise ConfigError([f'{problem}; name its own as "eos_token" in {settings_file}'])
        self.vocab_size = max(ids.values()) + 1
        self.identity = hashlib.sha256(f"{content}/{self.bos}/{self.eos}{added or ''}".encode()).hexdigest()

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """Return the token ids of each text, uint32, without BOS and EOS. A text of more than CHUNK characters is
        encoded in chunks, which end where a line does, if it has lines."""
        split = [split_text(text) for text in texts]
        chunks = [chunk for own in split for chunk in own]
        numbers = [number for number, own in enumerate(split) for _ in own]
        ids: list[list[np.ndarray]] = [[] for _ in texts]
        begin, size = 0, 0
        for end, chunk in enumerate(chunks, 1):
            size += len(chunk)
            if size >= BATCH or end == len(chunks):
                for number, tokens in zip(numbers[begin:end], self.encode_chunks(chunks[begin:end]), strict=True):
                    ids[number].append(tokens)
                begin, size = end, 0
        return [own[0] if len(own) == 1 else np.concatenate(own) for own in ids]

    def encode_chunks(self, chunks: list[str]) -> list[Tokens]:
        """Return the token ids of each text, encoded together. Raises ConfigError for a text that cannot be."""
        restart_time_limit()
        try:
            encodings = self.tokenizer.encode_batch_fast(chunks, add_special_tokens=False)
        except BaseException as error:  # a panic of Rust code is no Exception
            for chunk in chunks if len(chunks) > 1 else []:
                self.encode_chunks([chunk])
            problem = f"{self.file}: cannot encode the text {show(chunks[0][:40])}: {reason_of(error)}"
            raise ConfigError([problem]) from None
        # an array of the standard library: 3 times as fast as np.array of a list
        return [np.frombuffer(array("I", encoding.ids), np.uint32) for encoding in encodings]

    def decode(self, tokens: list[int]) -> str:
        """Return the text of tokens. Special tokens, and tokens that the vocabulary lacks, have none."""
        return self.tokenizer.decode(tokens, skip_special_tokens=True)
