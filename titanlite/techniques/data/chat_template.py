"""Chat templates: from the messages of a conversation to its text, and which of it the assistant has said.

A template is data of the tokenizer, written in the language of jinja2, and runs in jinja2's sandbox: it has no files,
no attributes that lead to code, no time and no random numbers.

What the template writes may be special tokens, and what a message holds never is. To tell them apart in any template,
special tokens in messages are replaced before it runs by two characters each that stand for them.
"""

import hashlib
import itertools
import json
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import jinja2
import numpy as np
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from titanlite.config.loader import ConfigError
from titanlite.config.regular_file import read_file
from titanlite.config.schema import Training
from titanlite.data.hf_tokenizer import LARGEST_FILE, HuggingFaceTokenizer, reason_of, restart_time_limit
from titanlite.data.token_shards import DType, not_trained_bit
from titanlite.data.tokenizer import Tokenizer
from titanlite.techniques.data.rows import conversation_of, unread_keys

ESCAPE, BEGIN, END = "\ufdd0", "\ufdd1", "\ufdd2"
"""Noncharacters of Unicode: ESCAPE and the character after it stand for a text of `escaped`; BEGIN and END are around
what the assistant says."""
FIRST = 0xF0000
"""The character after ESCAPE that stands for the first text; the others follow. It is of a plane for private use."""
LARGEST_CONVERSATION = 1000
"""Messages, if the template has no {% generation %}: it then renders up to all of them for each of the assistant's."""


class Span(NamedTuple):
    """A part of a conversation's text; no token crosses its limits."""

    text: str
    is_trained: bool
    is_ordinary: bool
    """Whether special tokens in it are encoded as ordinary text."""


class Conversation(str):
    """The text of a conversation, with the spans that it is made of."""

    spans: list[Span]

    def __new__(cls, spans: list[Span]) -> "Conversation":
        conversation = super().__new__(cls, "".join(span.text for span in spans))
        conversation.spans = spans
        return conversation


class _Sandbox(ImmutableSandboxedEnvironment):
    """A sandbox in which a forbidden attribute is an error also where it is only printed."""

    def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:
        raise SecurityError(f"{attribute!r} of a value of type {type(obj).__name__} is forbidden")


class _Generation(Extension):
    """The block {% generation %} ... {% endgeneration %}, around what the assistant says."""

    tags = frozenset({"generation"})

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Any) -> str:
        return f"{BEGIN}{caller()}{END}"


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, sort_keys: bool = False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, sort_keys=sort_keys)


def _environment() -> jinja2.Environment:
    extensions = [_Generation, "jinja2.ext.loopcontrols"]
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    for name in set(environment.globals) - {"range", "dict", "namespace"}:
        del environment.globals[name]
    del environment.filters["random"]
    environment.globals["raise_exception"] = _raise_exception
    environment.filters["tojson"] = _to_json
    return environment


class ChatTemplate:
    """The chat template of a tokenizer. Raises ConfigError if it has none, or one that cannot be read."""

    def __init__(self, tokenizer: Tokenizer):
        if not isinstance(tokenizer, HuggingFaceTokenizer):
            problem = "model.hf_assets_path: bytes have no chat template; name the folder of a tokenizer that has one"
            raise ConfigError([problem])
        path = Path(tokenizer.path)
        self.tokenizer, self.for_template = tokenizer, HuggingFaceTokenizer(path)
        self.for_template.tokenizer.encode_special_tokens = False
        self.file, self.source, self.special_tokens = _read(path if path.is_dir() else path.parent)
        for name in ("bos", "eos"):
            token = getattr(tokenizer, name)
            if token is not None:
                self.special_tokens[f"{name}_token"] = tokenizer.tokenizer.id_to_token(token)
        added = tokenizer.tokenizer.get_added_tokens_decoder().values()
        self.escaped = sorted((token.content for token in added if token.special), key=lambda text: (-len(text), text))
        self.escaped += [ESCAPE, BEGIN, END]
        self._pattern = re.compile("|".join(map(re.escape, self.escaped)))
        self._numbers = {text: number for number, text in enumerate(self.escaped)}
        try:
            self.has_generation = bool(re.search(r"\{%[-+]?\s*generation\b", self.source))
            self.template = _environment().from_string(self.source)
        except Exception as error:  # of jinja2's parser, or of Python's for what that passes on
            raise ConfigError([f"{self.file}: the chat template cannot be read: {_reason(error)}"]) from None
        identity = json.dumps([self.source, self.special_tokens, self.escaped])
        self.identity = hashlib.sha256(identity.encode("utf-8", "surrogatepass")).hexdigest()

    @staticmethod
    def identity_of(tokenizer: Tokenizer) -> str:
        """Return the identity of a tokenizer's chat template."""
        return ChatTemplate(tokenizer).identity

    def document(self, training: Training, values: dict[str, Any], unread: set[str]) -> Conversation:
        """Return the conversation of a row, by its columns; `unread` gets the keys of its messages that the template
        does not read. Raises ValueError if it is none, or cannot be rendered."""
        restart_time_limit()
        try:
            row = conversation_of(training, values)
            unread |= unread_keys(training, row.messages, self.source)
            return self.conversation(row.messages, tools=row.tools, not_trained=row.not_trained)
        except (RecursionError, MemoryError) as error:
            raise ValueError(f"a conversation that is too large, or nested too deep: {type(error).__name__}") from None

    def conversation(
        self, messages: list[dict[str, Any]], tools: list[Any] | None = None, not_trained: Collection[int] = ()
    ) -> Conversation:
        """Return the text of messages, with the tools that the assistant may call. Messages whose indices are
        `not_trained` are not trained on. Raises ValueError if the template cannot render them, or does so in a way that
        does not tell what the assistant has said."""
        if not any(message["role"] == "assistant" for message in messages):
            raise ValueError('no message has the role "assistant", so there is nothing to train on')
        if len(messages) > LARGEST_CONVERSATION and not self.has_generation:
            problem = f"{len(messages):,} messages: expected at most {LARGEST_CONVERSATION:,}; divide it, or put what "
            raise ValueError(f"{problem}the assistant says into {{% generation %}} in {self.file}")
        escaped, tools = self._escape(messages), self._escape(tools)
        text = self._render(escaped, tools)
        text.encode()  # UnicodeEncodeError, which is a ValueError, if it has half of a surrogate pair
        regions = list(
            _marked_regions(text) if self.has_generation else self._regions_by_prefixes(escaped, tools, text)
        )
        if not_trained:
            said = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
            if len(said) != sum(is_said for _, is_said in regions):
                problem = "does not have one {% generation %} for each of the assistant's messages, of which some are "
                raise ValueError(f"{self.file} {problem}not to be trained on")
            numbers = iter(said)
            regions = [(part, is_said and next(numbers) not in not_trained) for part, is_said in regions]
        spans = [span for region, is_trained in regions for span in self._spans(region, is_trained=is_trained)]
        if not not_trained and not any(span.is_trained for span in spans):
            raise ValueError(f"{self.file} renders nothing that the assistant has said")
        return Conversation(spans)

    def prompt(self, text: str) -> list[int]:
        """Return the tokens of a user's message and of the beginning of the assistant's answer. Raises ValueError if
        the template cannot render them."""
        rendered = self._render([self._escape({"role": "user", "content": text})], add_generation_prompt=True)
        spans = list(self._spans(rendered, is_trained=True))
        return self.encode([Conversation(spans)], "uint32")[0].tolist()

    def encode(self, conversations: list[Conversation], dtype: DType) -> list[np.ndarray]:
        """Return the tokens of each conversation; those that are not trained on have the bit `not_trained_bit`."""
        spans = [span for conversation in conversations for span in conversation.spans]
        tokens: list[Any] = [None] * len(spans)
        for is_ordinary, tokenizer in ((True, self.tokenizer), (False, self.for_template)):
            chosen = [index for index, span in enumerate(spans) if span.is_ordinary == is_ordinary]
            for index, own in zip(chosen, tokenizer.encode([spans[index].text for index in chosen]), strict=True):
                tokens[index] = own if spans[index].is_trained else own | np.uint32(not_trained_bit(dtype))
        rest = iter(tokens)
        return [np.concatenate([*itertools.islice(rest, len(own.spans))]).astype(dtype) for own in conversations]

    def _escape(self, value: Any) -> Any:
        """Return a value with the texts of `escaped` in its strings replaced."""
        if isinstance(value, dict):
            return {key: self._escape(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self._escape(item) for item in value]
        if isinstance(value, str):
            return self._pattern.sub(lambda match: ESCAPE + chr(FIRST + self._numbers[match[0]]), value)
        return value

    def _render(self, messages: list[dict[str, Any]], tools: Any = None, *, add_generation_prompt: bool = False) -> str:
        options = {"add_generation_prompt": add_generation_prompt, "tools": tools, "documents": None}
        try:
            return self.template.render(messages=messages, **self.special_tokens, **options)
        except Exception as error:  # whatever a template does
            raise ValueError(f"{self.file} cannot render it: {_reason(error)}") from None

    def _regions_by_prefixes(self, messages: list[dict[str, Any]], tools: Any, text: str) -> Iterator[tuple[str, bool]]:
        """Yield the parts of a rendered text in order, and whether the assistant has said them: what comes after the
        messages before and the beginning of an answer, up to the end of the message."""
        end = 0
        for index, message in enumerate(messages):
            if message["role"] == "assistant":
                before = self._render(messages[:index], tools, add_generation_prompt=True)
                through = text if index == len(messages) - 1 else self._render(messages[: index + 1], tools)
                if not (text.startswith(through) and through.startswith(before) and len(before) >= end):
                    problem = f"{self.file} renders message {index + 1} in another way when others follow it, so what "
                    problem += "the assistant has said cannot be found; put it into {% generation %} in the template"
                    raise ValueError(problem)
                yield text[end : len(before)], False
                yield text[len(before) : len(through)], True
                end = len(through)
        yield text[end:], False

    def _spans(self, region: str, *, is_trained: bool) -> Iterator[Span]:
        """Yield the spans of a part of a rendered text: the texts that were escaped, and what is between them."""
        end = 0
        for match in re.finditer(f"{ESCAPE}(.)", region, re.DOTALL):
            if not 0 <= ord(match[1]) - FIRST < len(self.escaped):
                raise ValueError(f"{self.file} changes the messages in a way that cannot be read back")
            if match.start() > end:
                yield Span(region[end : match.start()], is_trained, False)
            yield Span(self.escaped[ord(match[1]) - FIRST], is_trained, True)
            end = match.end()
        if end < len(region):
            yield Span(region[end:], is_trained, False)


def encode_questions(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    """Return the tokens of each text as a user's message in the tokenizer's chat template, up to where the answer
    begins. Raises ConfigError if there is no template, or it cannot render a message."""
    template = ChatTemplate(tokenizer)
    try:
        return [template.prompt(text) for text in texts]
    except ValueError as error:
        raise ConfigError([f"--chat: {error}"]) from None


def _marked_regions(text: str) -> Iterator[tuple[str, bool]]:
    """Yield the parts of a rendered text in order, and whether they are in a {% generation %} block."""
    depth = 0
    for part in re.split(f"([{BEGIN}{END}])", text):
        if part in (BEGIN, END):
            depth += 1 if part == BEGIN else -1
        else:
            yield part, depth > 0


def _reason(error: BaseException) -> str:
    line = getattr(error, "lineno", None)
    return f"line {line}: {reason_of(error)}" if line else reason_of(error)


def _read(folder: Path) -> tuple[Path, str, dict[str, str]]:
    """Return the file with a folder's chat template, the template, and the special tokens that the settings name."""
    file, settings_file = folder / "chat_template.jinja", folder / "tokenizer_config.json"
    settings: dict[str, Any] = {}
    if settings_file.exists():  # HuggingFaceTokenizer has read it
        settings = dict(json.loads(read_file(settings_file, LARGEST_FILE)))
    special_tokens = {}
    for name, token in settings.items():
        content = token.get("content") if isinstance(token, dict) else token
        if name.endswith("_token") and isinstance(content, str):
            special_tokens[name] = content
    if file.exists():
        try:
            return file, read_file(file, LARGEST_FILE).decode(), special_tokens
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError([f"{file}: cannot be read: {error}"]) from None
    template = settings.get("chat_template")
    if isinstance(template, list):  # several, by name
        named = {item.get("name"): item.get("template") for item in template if isinstance(item, dict)}
        template = named.get("default")
    if not isinstance(template, str):
        problem = (
            f'model.hf_assets_path: {folder} has no chat template, neither chat_template.jinja nor "chat_template" '
        )
        raise ConfigError([problem + "in tokenizer_config.json; a model that was made for chat has one"])
    return settings_file, template, special_tokens
