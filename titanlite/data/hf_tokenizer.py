"""The tokenizer of a Hugging Face folder, which transformers loads."""

import functools
import hashlib
import itertools
import json
import os
import re
import secrets
from array import array
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import PlainSerializer, PlainValidator

from titanlite.config.loader import ConfigError, show
from titanlite.config.regular_file import read_file
from titanlite.data.tokenizer import BATCH, Tokenizer, restart_time_limit

CHUNK = 2**18
"""Characters of a text that are encoded at a time; the library `tokenizers` needs some 200 bytes per token."""
OVERLAP = 2**12  # characters that two neighbouring chunks of a text have in common
LARGEST_FILE = 2**27  # maximum size of a tokenizer's file in bytes
FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "config.json")
FILES += ("chat_template.jinja",)
"""Files of a tokenizer's folder that transformers reads, if they exist."""
_FROM_JSON = PlainValidator(lambda text: np.frombuffer(bytearray.fromhex(str(text)), np.uint32))
Tokens = Annotated[np.ndarray, _FROM_JSON, PlainSerializer(lambda tokens: tokens.tobytes().hex())]
"""Token ids, uint32, which are hexadecimal text in a worker's messages."""


def reason_of(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def load(path: Path) -> Any:
    """Return transformers' tokenizer of a folder or tokenizer.json, without running its code or downloading files."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast  # imported here, since only a worker needs it

    restart_time_limit()
    folder = path.parent if path.name == FILES[0] else path
    for file in [folder / name for name in FILES] if folder.is_dir() else [path]:
        if os.path.lexists(file) or file.name == FILES[0]:
            read_file(file, LARGEST_FILE)
    if folder.is_dir():
        return AutoTokenizer.from_pretrained(str(folder.absolute()), local_files_only=True, trust_remote_code=False)
    return PreTrainedTokenizerFast(tokenizer_file=str(path))


def join(chunks: list[np.ndarray], shared: list[np.ndarray]) -> tuple[np.ndarray, list[int]]:
    """Join a text's tokens from overlapping chunks. Also return the indices of chunks that disagree with the chunk
    before. `shared` has the tokens of each overlap, encoded alone: both chunks must have those around its middle."""
    parts, failed, begin = [], [], 0
    for number, (one, other, both) in enumerate(zip(chunks, chunks[1:], shared, strict=False), 1):
        middle, near = len(both) // 2, min(len(both) // 4, 64)
        tail, head = both[middle - near :], both[: middle + near]
        if not (near and np.array_equal(one[-len(tail) :], tail) and np.array_equal(other[: len(head)], head)):
            failed.append(number)
        parts.append(one[begin : len(one) - (len(both) - middle)])
        begin = middle
    return np.concatenate([*parts, chunks[-1][begin:]]), failed


class HuggingFaceTokenizer(Tokenizer):
    """Encodes text with transformers' tokenizer, on all cores. `prefix` and `suffix` are the tokens that transformers
    adds to a text. EOS is the token that the tokenizer's files name, or one of KNOWN_EOS; if there is none, raise
    ConfigError. Special tokens that a text spells out are encoded as ordinary text unless `special` is set."""

    KNOWN_EOS = ("<|end_of_text|>", "</s>", "<|endoftext|>", "<eos>", "<|im_end|>")

    def __init__(self, path: Path):
        import tokenizers  # imported here, since only a worker needs tokenizers

        self.path, self.file = str(path), path / FILES[0] if path.is_dir() else path
        try:
            self.loaded = load(path)
            restart_time_limit()
            self.tokenizer = self.loaded.backend_tokenizer
            self.loaded("")  # raise an error now if the tokenizer cannot encode text
            # A tokenizer.json may ask for truncation and padding, which training does not want.
            self.tokenizer.no_truncation()
            self.tokenizer.no_padding()
            ids, added = self.tokenizer.get_vocab(), self.tokenizer.get_added_tokens_decoder().values()
            special = [token.content for token in added if token.special and not self.loaded.split_special_tokens]
            # `ordinary` gives special tokens random names, which no text contains. A random name keeps the first and
            # last characters of its token, since the tokenizer's rules for words look at them.
            self.names = {text: f"{text[0]}{secrets.token_hex(16)}{text[-1]}" for text in special}
            word = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a")).encode("a")
            around = self.tokenizer.post_process(word)  # encode a single token, and add special tokens around it
            at = around.special_tokens_mask.index(0)
            self.prefix, self.suffix = around.ids[:at], around.ids[at + 1 :]
            content = json.loads(self.tokenizer.to_str())
        except BaseException as error:  # a panic in the Rust library is a BaseException, not an Exception
            from titanlite.config.hf.values import read_json_object  # imported here: few tokenizer files are wrong

            for file in [path / name for name in FILES if name.endswith(".json") and (path / name).is_file()]:
                read_json_object(file, file.read_bytes())  # raises ConfigError if this file is no JSON object
            problem = f"model.hf_assets_path: {path} cannot be read as a tokenizer: {reason_of(error)}"
            raise ConfigError([problem]) from None
        known = [self.loaded.eos_token_id, *(ids.get(token) for token in self.KNOWN_EOS)]
        self.eos = next((number for number in known if number is not None), None)
        if self.eos is None:
            problem = f"model.hf_assets_path: {self.file} has none of the known EOS tokens {', '.join(self.KNOWN_EOS)}"
            raise ConfigError([f'{problem}; name its own as "eos_token" in {self.file.parent / FILES[1]}'])
        self.vocab_size = max(ids.values()) + 1
        identity = json.dumps([content, self.prefix, self.suffix, self.eos], sort_keys=True)
        self.identity = hashlib.sha256(identity.encode()).hexdigest()

    @functools.cached_property
    def ordinary(self) -> Any:
        """A copy of the tokenizer in which special tokens have random names, which no text can spell out."""
        dump = functools.partial(json.dumps, ensure_ascii=False)
        named = {dump(text): dump(name) for text, name in self.names.items()}
        pattern = "|".join(map(re.escape, named)) or "(?!)"
        content = re.sub(pattern, lambda match: named[match[0]], self.tokenizer.to_str())
        tokenizer = type(self.tokenizer).from_str(content)
        tokenizer.post_processor = None  # a post-processor would change the offsets of tokens
        tokenizer.encode_special_tokens = self.loaded.split_special_tokens
        return tokenizer

    def encode(self, texts: list[str], special: bool = False) -> list[np.ndarray]:
        """Return the token ids of each text, uint32, without prefix and suffix; encode a long text in chunks."""
        tokens: list[Any] = [None] * len(texts)
        limits = [[*range(0, max(len(text) - OVERLAP, 1), CHUNK), len(text)] for text in texts]
        known: dict[tuple[int, int, int], np.ndarray] = {}
        while missing := [n for n, own in enumerate(tokens) if own is None]:
            pairs = {n: itertools.pairwise(limits[n]) for n in missing}
            chunks = {n: [(n, begin, min(end + OVERLAP, len(texts[n]))) for begin, end in pairs[n]] for n in missing}
            shared = {n: [(n, begin, begin + OVERLAP) for begin in limits[n][1:-1]] for n in missing}
            wanted = [span for n in missing for span in [*chunks[n], *shared[n]] if span not in known]
            sizes = itertools.accumulate(end - begin for _, begin, end in wanted)
            for _, batch in itertools.groupby(zip(wanted, sizes, strict=True), lambda each: each[1] // BATCH):
                spans = [span for span, _ in batch]
                encoded = self.encode_chunks([texts[n][begin:end] for n, begin, end in spans], special)
                known.update(zip(spans, encoded, strict=True))
            for n in missing:
                joined, failed = join([known[span] for span in chunks[n]], [known[span] for span in shared[n]])
                tokens[n] = None if failed else joined
                limits[n] = [limit for index, limit in enumerate(limits[n]) if index not in failed]
        return tokens

    def encode_chunks(self, chunks: list[str], special: bool) -> list[Tokens]:
        encodings = self.encode_together(chunks, self.tokenizer if special else self.ordinary)
        # np.frombuffer of an array("I") is 3 times as fast as np.array of a list.
        return [np.frombuffer(array("I", encoding.ids), np.uint32) for encoding in encodings]

    def encode_together(self, texts: list[str], tokenizer: Any, *, with_offsets: bool = False) -> list[Any]:
        restart_time_limit()
        try:
            encode = tokenizer.encode_batch if with_offsets else tokenizer.encode_batch_fast
            return encode(texts, add_special_tokens=False)
        except BaseException as error:  # a panic in the Rust library is a BaseException
            for text in texts if len(texts) > 1 else []:
                self.encode_together([text], tokenizer)
            problem = f"{self.file}: cannot encode the text {show(texts[0][:40])}: {reason_of(error)}"
            raise ConfigError([problem]) from None

    def decode(self, tokens: list[int]) -> str:
        """Return the text of tokens. Special tokens, and tokens outside the vocabulary, have no text."""
        return self.tokenizer.decode(tokens, skip_special_tokens=True)
