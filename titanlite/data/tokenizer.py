"""Tokenizers, from text to token ids: bytes, or any Hugging Face tokenizer.json."""

import hashlib
import json
import re
from array import array
from pathlib import Path
from typing import Any

import numpy as np

from titanlite.config.loader import ConfigError, show

CHUNK, BATCH = 2**18, 2**20
"""Characters of a text, and of all texts, that are encoded at a time: the library takes some 200 bytes for each token
until then."""


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


class ByteTokenizer:
    """Makes every byte of UTF-8 a token; 256 is BOS and 257 is EOS."""

    bos: int | None = 256
    eos: int = 257
    vocab_size = 258
    identity, path = "bytes", ""

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """Return the token ids of each text, uint32, without BOS and EOS."""
        # surrogatepass: a text with a broken character is still bytes
        encoded = (text.encode("utf-8", "surrogatepass") for text in texts)
        return [np.frombuffer(text, dtype=np.uint8).astype(np.uint32) for text in encoded]

    def decode(self, tokens: list[int]) -> str:
        """Return the text of tokens. Special tokens have none, and broken UTF-8 has replacement characters."""
        return bytes(token for token in tokens if token < 256).decode("utf-8", "replace")


class HuggingFaceTokenizer:
    """Encodes text by a tokenizer.json, which the `tokenizers` library runs on all cores.

    The special tokens BOS and EOS are those that the tokenizer_config.json beside it names, else those that well-known
    models use; without EOS it raises ConfigError. Special tokens that a text spells out are encoded as ordinary text,
    so a text cannot end its own document.
    """

    KNOWN_BOS = ("<|begin_of_text|>", "<s>", "<bos>")
    KNOWN_EOS = ("<|end_of_text|>", "</s>", "<|endoftext|>", "<eos>", "<|im_end|>")

    def __init__(self, path: Path):
        from tokenizers import Tokenizer  # here, since a run on bytes does not need it

        self.path = str(path)
        file = path / "tokenizer.json" if path.is_dir() else path
        settings_file = file.parent / "tokenizer_config.json"
        try:
            content = file.read_text(encoding="utf-8")
            self.tokenizer = Tokenizer.from_str(content)
            settings = dict(json.loads(settings_file.read_text(encoding="utf-8"))) if settings_file.exists() else {}
        except Exception as error:  # `tokenizers` raises bare Exception
            raise ConfigError([f"model.hf_assets_path: {file} cannot be read as a tokenizer: {error}"]) from None
        self.tokenizer.encode_special_tokens = True
        self.tokenizer.no_truncation()  # a tokenizer.json may ask for both, for other uses than training
        self.tokenizer.no_padding()
        known_bos = () if "bos_token" in settings else self.KNOWN_BOS  # null: the model has none
        self.bos = self._special_token("bos_token", settings, settings_file, known_bos)
        eos = self._special_token("eos_token", settings, settings_file, self.KNOWN_EOS)
        if eos is None:
            problem = f"model.hf_assets_path: {file} has none of the known EOS tokens {', '.join(self.KNOWN_EOS)}"
            raise ConfigError([f'{problem}; name its own as "eos_token" in {settings_file}'])
        self.eos = eos
        self.vocab_size = max(self.tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        self.identity = hashlib.sha256(f"{content}/{self.bos}/{self.eos}".encode()).hexdigest()

    def _special_token(self, name: str, settings: dict[str, Any], file: Path, known: tuple[str, ...]) -> int | None:
        """Return the id of the token that the settings name, as a string or an object with its content; else that of
        the first known token that the vocabulary has. Raise ConfigError if the named one is not in the vocabulary."""
        token = settings.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        if token is None:
            token_ids = (self.tokenizer.token_to_id(token) for token in known)
            return next((token_id for token_id in token_ids if token_id is not None), None)
        token_id = self.tokenizer.token_to_id(str(token))
        if token_id is None:
            raise ConfigError([f"model.hf_assets_path: {file} names {name} {show(token)}, which the vocabulary lacks"])
        return token_id

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """Return the token ids of each text, uint32, without BOS and EOS. A text of more than CHUNK characters is
        encoded in chunks, which end where a line does, if it has lines."""
        chunks, numbers = [], []
        for number, text in enumerate(texts):
            for chunk in split_text(text):
                chunks.append(chunk)
                numbers.append(number)
        ids: list[list[np.ndarray]] = [[] for _ in texts]
        begin, size = 0, 0
        for end, chunk in enumerate(chunks, 1):
            size += len(chunk)
            if size >= BATCH or end == len(chunks):
                encodings = self.tokenizer.encode_batch_fast(chunks[begin:end], add_special_tokens=False)
                for number, encoding in zip(numbers[begin:end], encodings, strict=True):
                    # an array of the standard library: 3 times as fast as np.array of a list
                    ids[number].append(np.frombuffer(array("I", encoding.ids), np.uint32))
                begin, size = end, 0
        return [own[0] if len(own) == 1 else np.concatenate(own) for own in ids]

    def decode(self, tokens: list[int]) -> str:
        """Return the text of tokens. Special tokens, and tokens that the vocabulary lacks, have none."""
        return self.tokenizer.decode(tokens, skip_special_tokens=True)


Tokenizer = ByteTokenizer | HuggingFaceTokenizer


def build_tokenizer(hf_assets_path: str) -> Tokenizer:
    """Return the tokenizer of a path, or that of bytes for an empty one. Raise ConfigError if it cannot be used."""
    return HuggingFaceTokenizer(Path(hf_assets_path).expanduser()) if hf_assets_path else ByteTokenizer()


def encode_documents(tokenizer: Tokenizer, texts: list[str]) -> list[np.ndarray]:
    """Return the token ids of each document, uint32: BOS (if the tokenizer has one), the text, EOS."""
    bos = np.array([] if tokenizer.bos is None else [tokenizer.bos], np.uint32)
    eos = np.array([tokenizer.eos], np.uint32)
    return [np.concatenate([bos, tokens, eos]) for tokens in tokenizer.encode(texts)]
