"""Text to token numbers: bytes, or any Hugging Face tokenizer.json."""

import hashlib
import json
from pathlib import Path

import numpy as np

from titanlite.config.loader import ConfigError, show


class ByteTokenizer:
    """Every byte of UTF-8 is a token; 256 begins a document and 257 ends it."""

    bos: int | None = 256
    eos: int = 257
    vocab_size = 258
    identity = "bytes"

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """Token numbers of each text, uint32, without the marks of begin and end."""
        # surrogatepass: a text with a broken character is still bytes
        encoded = (text.encode("utf-8", "surrogatepass") for text in texts)
        return [np.frombuffer(text, dtype=np.uint8).astype(np.uint32) for text in encoded]


class HuggingFaceTokenizer:
    """A tokenizer.json, run by the `tokenizers` library on all cores.

    The begin and end marks are those that the tokenizer_config.json beside it names, else those that well-known models
    use. Marks that a text spells out are encoded as ordinary text, so that a text cannot end its own document.
    """

    KNOWN_BOS = ("<|begin_of_text|>", "<s>", "<bos>")
    KNOWN_EOS = ("<|end_of_text|>", "</s>", "<|endoftext|>", "<eos>", "<|im_end|>")

    def __init__(self, path: Path):
        from tokenizers import Tokenizer  # here, since a run on bytes does not need it

        file = path / "tokenizer.json" if path.is_dir() else path
        settings = file.parent / "tokenizer_config.json"
        try:
            content = file.read_text(encoding="utf-8")
            self.tokenizer = Tokenizer.from_str(content)
            marks = dict(json.loads(settings.read_text(encoding="utf-8"))) if settings.exists() else {}
        except Exception as error:  # `tokenizers` raises bare Exception
            raise ConfigError([f"model.hf_assets_path: {file} cannot be read as a tokenizer: {error}"]) from None
        self.tokenizer.encode_special_tokens = True
        self.tokenizer.no_truncation()  # what a tokenizer.json may say of other uses
        self.tokenizer.no_padding()
        self.bos = self._named_mark(marks, "bos_token", settings)
        if "bos_token" not in marks:
            self.bos = self._known_mark(self.KNOWN_BOS)
        eos = self._named_mark(marks, "eos_token", settings)
        eos = self._known_mark(self.KNOWN_EOS) if eos is None else eos
        if eos is None:
            raise ConfigError(
                [
                    f"model.hf_assets_path: {file} has none of the known end marks {', '.join(self.KNOWN_EOS)}; name "
                    f'its own as "eos_token" in {settings}'
                ]
            )
        self.eos = eos
        self.vocab_size = max(self.tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        self.identity = hashlib.sha256(f"{content}/{self.bos}/{self.eos}".encode()).hexdigest()

    def _named_mark(self, marks: dict[str, object], name: str, settings: Path) -> int | None:
        """Number of the mark that the settings name (a string, or an object with its content); None where they do not.

        Raises:
            ConfigError: if the vocabulary does not have it.
        """
        mark = marks.get(name)
        mark = mark.get("content") if isinstance(mark, dict) else mark
        if mark is None:
            return None
        number = self.tokenizer.token_to_id(str(mark))
        if number is None:
            raise ConfigError(
                [f"model.hf_assets_path: {settings} names {name} {show(mark)}, which the vocabulary lacks"]
            )
        return number

    def _known_mark(self, known: tuple[str, ...]) -> int | None:
        numbers = (self.tokenizer.token_to_id(mark) for mark in known)
        return next((number for number in numbers if number is not None), None)

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """Token numbers of each text, uint32, without the marks of begin and end."""
        encodings = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]


Tokenizer = ByteTokenizer | HuggingFaceTokenizer


def build_tokenizer(hf_assets_path: str) -> Tokenizer:
    """Raises ConfigError if the path holds no usable tokenizer."""
    return HuggingFaceTokenizer(Path(hf_assets_path).expanduser()) if hf_assets_path else ByteTokenizer()


def encode_documents(tokenizer: Tokenizer, texts: list[str]) -> list[np.ndarray]:
    """Token numbers of each document with its marks: begin (if the tokenizer has one), text, end."""
    begin = [] if tokenizer.bos is None else [tokenizer.bos]
    return [
        np.concatenate([np.array(begin, np.uint32), tokens, np.array([tokenizer.eos], np.uint32)])
        for tokens in tokenizer.encode(texts)
    ]
