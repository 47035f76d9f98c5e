"""Chat templates turn the messages of a conversation into tokens, and tell which tokens the assistant wrote.
transformers renders templates in jinja2's sandbox, in which a template can reach neither files nor code. The template
may write special tokens, but a special token in a message is ordinary text, unless special_tokens_in_text = "special":
while the template runs, each special token in a message is replaced by two other characters."""

import contextlib
import functools
import hashlib
import itertools
import json
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np

from titanlite.config.loader import ConfigError, show
from titanlite.config.schema import Training
from titanlite.data.hf_tokenizer import HuggingFaceTokenizer, reason_of, restart_time_limit
from titanlite.data.shard_builder import N_SEARCHED, spelled
from titanlite.data.token_shards import DType, not_trained_bit
from titanlite.data.tokenizer import Tokenizer
from titanlite.techniques.data.rows import KEYS, Row, conversation_of, unread_keys

ESCAPE, BEGIN, END = "\ufdd0", "\ufdd1", "\ufdd2"
"""Noncharacters of Unicode. ESCAPE begins an escaped text; BEGIN and END enclose the assistant's text."""
FIRST = 0xF0000
"""Private-use character: after ESCAPE, FIRST + i stands for text i of `ChatTemplate.escaped`."""
LARGEST_CONVERSATION = 1000
"""Maximum number of messages if the template lacks {% generation %}, since the template then runs for each answer."""
THOUGHT = "</think>"
"""The text that ends the reasoning in a message. Some templates leave the reasoning out."""
TAGS = {
    "generation": rf"{{%\1 generation %}}{{% if true %}}{{{{'{BEGIN}'}}}}{{% endif \2%}}",
    "endgeneration": rf"{{%\1 if true %}}{{{{'{END}'}}}}{{% endif %}}{{% endgeneration \2%}}",
}
"""Replacements of two tags in a template. They are jinja2 blocks, so that white space around them is still trimmed."""
Regions = list[tuple[str, bool]]
"""Consecutive regions of a rendered text: the text of a region, and whether it is trained on."""


class Conversation(str):
    """The text of a conversation, or of its beginning up to the end of an answer."""

    named: str
    """The text with each special token replaced by its name in `HuggingFaceTokenizer.ordinary`."""
    trained: list[tuple[int, int]]
    """Ranges of characters of `named` that are trained on, as (begin, end)."""
    is_beginning = False
    """Whether another Conversation of the same dataset row follows."""


class ChatTemplate:
    """The chat template of a tokenizer. Raises ConfigError if the tokenizer has no chat template."""

    def __init__(self, tokenizer: Tokenizer):
        if not isinstance(tokenizer, HuggingFaceTokenizer):
            problem = "model.hf_assets_path: bytes have no chat template; name the folder of a tokenizer that has one"
            raise ConfigError([problem])
        self.tokenizer, self._searched, path = tokenizer, 0, Path(tokenizer.path)
        folder = path if path.is_dir() else path.parent
        files = [folder / name for name in ("chat_template.jinja", "tokenizer_config.json")]
        self.file = next((file for file in files if file.exists()), files[-1])
        if tokenizer.loaded.chat_template is None:
            problem = f"model.hf_assets_path: {folder} has no chat template, neither chat_template.jinja nor "
            problem += '"chat_template" in tokenizer_config.json; a model that was made for chat has one'
            raise ConfigError([problem])
        self.escaped = [*sorted(tokenizer.names, key=lambda text: (-len(text), text)), ESCAPE, BEGIN, END]
        self._pattern = re.compile("|".join(map(re.escape, self.escaped)))
        self._numbers = {text: number for number, text in enumerate([*self.escaped, THOUGHT])}
        added = [token.content for token in tokenizer.tokenizer.get_added_tokens_decoder().values()]
        written = [f"{ESCAPE}(?s:.?)", *map(re.escape, sorted(added, key=len, reverse=True))]
        self._written = re.compile("|".join(written))
        identity = json.dumps([tokenizer.loaded.chat_template, tokenizer.loaded.special_tokens_map, self.escaped])
        self.identity = hashlib.sha256(identity.encode("utf-8", "surrogatepass")).hexdigest()

    @staticmethod
    def identity_of(tokenizer: Tokenizer) -> str:
        return ChatTemplate(tokenizer).identity

    def document(self, training: Training, values: dict[str, Any], unread: set[str]) -> list[Conversation]:
        """Return the conversations of a row to train on; `values` are its columns. Adds the message keys that the
        template ignores to `unread`. Raises ValueError if the row is no conversation or cannot be rendered."""
        restart_time_limit()
        try:
            row = conversation_of(training, values)
            *_, words = self._source(row.tools)
            unread |= unread_keys(training, row.messages, words)
            special = training.special_tokens_in_text == "special"
            if self._searched < N_SEARCHED and not special:  # search the first conversations for special tokens
                self._searched += 1
                unread |= spelled(self.tokenizer, [f"{row.messages}{row.tools}"])
            found = self.conversations(row, special=special)
        except (RecursionError, MemoryError) as error:
            raise ValueError(f"a conversation that is too large, or nested too deep: {type(error).__name__}") from None
        found = [own for own in found if own.trained] or found[-1:]
        for own in found[:-1]:
            own.is_beginning = True
        return found

    def conversations(self, row: Row, *, special: bool = False) -> list[Conversation]:
        """Return a row's conversations. The last one is complete. Before it come beginnings of it, each of which ends
        with an answer that the template renders in another way (such as without reasoning) if messages follow.
        `special`: messages may contain special tokens. Raises ValueError if the template cannot render the messages, or
        it is unclear which text the assistant wrote."""
        messages, tools, not_trained = row
        if not any(message["role"] == "assistant" for message in messages):
            raise ValueError('no message has the role "assistant", so there is nothing to train on')
        _, has_generation, _ = self._source(tools)
        if len(messages) > LARGEST_CONVERSATION and not has_generation:
            problem = f"{len(messages):,} messages: expected at most {LARGEST_CONVERSATION:,}; divide it, or put what "
            raise ValueError(f"{problem}the assistant says into {{% generation %}} in {self.file}")
        messages = [{key: value for key, value in message.items() if value is not None} for message in messages]
        escaped, tools_escaped = self._escape(messages, special), self._escape(tools, special)
        text = self._render(escaped, tools_escaped)
        text.encode()  # half of a surrogate pair raises UnicodeEncodeError, a ValueError
        if (escaped, tools_escaped) != (messages, tools) and self._read(text) != self._render(messages, tools):
            problem = f"{self.file} reads special tokens in messages, which are ordinary text; set "
            raise ValueError(f'{problem}training.special_tokens_in_text = "special", or remove them')
        for number, message in enumerate(escaped, 1):
            if isinstance(message.get("content"), list) and str(message["content"]) in text:
                raise ValueError(f"{self.file} cannot render message {number}: its content is a list; write a string")
        beginnings: list[Regions] = []
        if has_generation:
            regions = _marked_regions(text)
            said = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
            if not_trained and len(said) != sum(is_said for _, is_said in regions):
                problem = "does not have one {% generation %} for each of the assistant's messages, of which some are "
                raise ValueError(f"{self.file} {problem}not to be trained on")
            numbers = iter(said if not_trained else ())
            regions = [(part, is_said and next(numbers, None) not in not_trained) for part, is_said in regions]
        else:
            regions, beginnings = self._regions_by_prefixes(escaped, tools_escaped, text, not_trained)
        found = [self._conversation(own) for own in [*beginnings, regions]]
        if not not_trained and not any(own.trained for own in found):
            raise ValueError(f"{self.file} renders nothing that the assistant has said")
        return found

    def prompt(self, text: str) -> list[int]:
        """Return the tokens of a user's message and of the generation prompt. Raises ValueError if rendering fails."""
        rendered = self._render(self._escape([{"role": "user", "content": text}]), add_generation_prompt=True)
        return self.encode([self._conversation([(rendered, True)])], "uint32")[0].tolist()

    def encode(self, conversations: list[Conversation], dtype: DType) -> list[np.ndarray]:
        """Return the tokens of each conversation. Tokens that are not trained on have the bit `not_trained_bit`."""
        texts, bit = [own.named for own in conversations], np.uint32(not_trained_bit(dtype))
        encodings = self.tokenizer.encode_together(texts, self.tokenizer.ordinary, with_offsets=True)
        tokens = []
        for own, encoding in zip(conversations, encodings, strict=True):
            begins, ends = np.array(encoding.offsets, np.int64).reshape(-1, 2).T
            limits = np.array([*own.trained, (2**62, 2**62)], np.int64)
            near = limits[np.searchsorted(limits[:, 1], begins, side="right")]  # trained region at or after each token
            ids = np.array(encoding.ids, np.uint32)
            tokens.append(np.where(near[:, 0] < np.maximum(ends, begins + 1), ids, ids | bit).astype(dtype))
        return tokens

    def _source(self, tools: Any) -> tuple[str, bool, frozenset[str]]:
        return _analyzed(self.tokenizer.loaded.get_chat_template(tools=tools))

    def _escape(self, value: Any, special: bool = False) -> Any:
        """Replace the texts in `self.escaped` in all strings of a value; with `special`, keep special tokens."""
        if isinstance(value, dict):
            return {self._escape(key, special): self._escape(item, special) for key, item in value.items()}
        if isinstance(value, list):
            return [self._escape(item, special) for item in value]
        if isinstance(value, str):
            pattern = f"[{ESCAPE}{BEGIN}{END}]" if special else self._pattern
            return re.sub(pattern, lambda match: ESCAPE + chr(FIRST + self._numbers[match[0]]), value)
        return value

    def _read(self, text: str, *, named: bool = False) -> str:
        """Undo `_escape` in a rendered text. `named`: replace special tokens by their names in tokenizer.names."""

        def text_of_match(match: re.Match[str]) -> str:
            if match[0][0] != ESCAPE:
                return names.get(match[0], match[0])
            number = ord(match[0][1:] or "\0") - FIRST
            if not 0 <= number <= len(self.escaped):
                raise ValueError(f"{self.file} changes the messages in a way that cannot be read back")
            return self.escaped[number] if number < len(self.escaped) else names.get(THOUGHT, THOUGHT)

        names = self.tokenizer.names if named else {}
        return self._written.sub(text_of_match, text)

    def _render(self, messages: list[dict[str, Any]], tools: Any = None, *, add_generation_prompt: bool = False) -> str:
        source, *_ = self._source(tools)
        options = {"tools": tools, "chat_template": source, "add_generation_prompt": add_generation_prompt}
        try:
            return self.tokenizer.loaded.apply_chat_template(messages, tokenize=False, **options)
        except Exception as error:  # a template may raise anything
            line = getattr(error, "lineno", None)
            reason = f"line {line}: {reason_of(error)}" if line else reason_of(error)
            raise ValueError(f"{self.file} cannot render it: {reason}") from None

    def _regions_by_prefixes(
        self, messages: list[dict[str, Any]], tools: Any, text: str, not_trained: Collection[int]
    ) -> tuple[Regions, list[Regions]]:
        """Return the regions of a rendered text, and the regions of each beginning that the template renders in another
        way if messages follow. An answer begins after the earlier messages and the generation prompt, as rendered."""
        regions, beginnings, end = [], [], 0
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            through = text if index == len(messages) - 1 else self._render(messages[: index + 1], tools)
            before = self._before(messages[: index + 1], tools, through)
            if not through.startswith(before) and THOUGHT in str(message.get("content")):
                # The prompt asks for the reasoning, which the template finds by THOUGHT and drops: escape THOUGHT.
                thought = message["content"].replace(THOUGHT, ESCAPE + chr(FIRST + self._numbers[THOUGHT]))
                through = self._render([*messages[:index], {**message, "content": thought}], tools)
            if not through.startswith(before):
                asked = show(before[len(_common(before, through)) :])
                problem = f"{self.file} renders message {index + 1} in another way than an answer begins ({asked}), so "
                problem += "what the assistant says cannot be found; put it into {% generation %} in the template"
                raise ValueError(problem)
            is_trained = index not in not_trained
            if text.startswith(through) and len(before) >= end:
                regions += [(text[end : len(before)], False), (text[len(before) : len(through)], is_trained)]
                end = len(through)
            elif is_trained:
                beginnings.append([(before, False), (through[len(before) :], True)])
        return [*regions, (text[end:], False)], beginnings

    def _before(self, messages: list[dict[str, Any]], tools: Any, through: str) -> str:
        """Return the rendered text before the last of `messages`, an answer. `through`: the text of all `messages`."""
        if len(messages) > 1:
            with contextlib.suppress(ValueError):  # some templates reject a conversation without its last answer
                return self._render(messages[:-1], tools, add_generation_prompt=True)
        prompt = self._render(messages, tools, add_generation_prompt=True).removeprefix(through)
        if prompt and prompt in through:
            return through[: through.rindex(prompt) + len(prompt)]
        return _common(through, self._render([*messages[:-1], {"role": "assistant", "content": END}], tools))

    def _conversation(self, regions: Regions) -> Conversation:
        conversation = Conversation("".join(self._read(text) for text, _ in regions))
        texts = [self._read(text, named=True) for text, _ in regions]
        limits = itertools.pairwise(itertools.accumulate(map(len, texts), initial=0))
        conversation.named = "".join(texts)
        conversation.trained = [own for own, (text, said) in zip(limits, regions, strict=True) if said and text]
        return conversation


def encode_questions(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    """Return the tokens of each text as a user's message. Raises ConfigError if the template cannot render a text."""
    template = ChatTemplate(tokenizer)
    try:
        return [template.prompt(text) for text in texts]
    except ValueError as error:
        raise ConfigError([f"--chat: {error}"]) from None


@functools.lru_cache(maxsize=4)
def _analyzed(source: str) -> tuple[str, bool, frozenset[str]]:
    """Return a template's source with TAGS replaced, whether it has {% generation %}, and the set of its words."""
    marked = source
    for tag, text in TAGS.items():
        marked = re.sub(rf"\{{%([-+]?)\s*{tag}\s*([-+]?)%\}}", text, marked)
    return marked, bool(re.search(r"\{%[-+]?\s*generation\b", source)), frozenset([*KEYS, *re.findall(r"\w+", source)])


def _common(one: str, other: str) -> str:
    return "".join(a for a, b in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _marked_regions(text: str) -> Regions:
    """Return the regions of a rendered text; regions in a {% generation %} block are trained on."""
    depth, regions = 0, []
    for part in re.split(f"([{BEGIN}{END}])", text):
        if part in (BEGIN, END):
            depth += 1 if part == BEGIN else -1
        else:
            regions.append((part, depth > 0))
    return regions
