"""The conversation of a dataset's row: its messages, its tools, and which messages are trained on."""

import json
import re
from typing import Any, NamedTuple

from titanlite.config.loader import show
from titanlite.config.schema import Training
from titanlite.data.documents import text_of
from titanlite.data.files import TOOLS

ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant", "observation": "tool"}
"""Roles that ShareGPT's key "from" has by other names."""
TRAINED = ("train", "trainable", "training", "weight", "loss")
"""Keys of a message by which other programs train on it (true, 1) or not (false, 0): axolotl, OpenAI, ms-swift."""
OTHER_MASKS = ("mask", "masked", "loss_mask", "loss_scale", "loss_weight", "train_detail", "training_detail")
"""Keys with which they mask or weight a message in ways of their own."""


class Row(NamedTuple):
    """A conversation as other programs write it."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None
    not_trained: set[int]
    """Indices of the assistant's messages that the row excludes from training."""


def conversation_of(training: Training, values: dict[str, Any]) -> Row:
    """Return the conversation of a row, by its columns. Raises ValueError if it has none, or says which messages to
    train on in an unsupported way."""
    tools, is_table = tools_of(values.get(TOOLS)), training.dataset != "json"
    if training.dataset_format == "prompt_response":
        roles = {"user": training.dataset_prompt_key, "assistant": training.dataset_response_key}
        return Row([{"role": role, "content": text_of(values[key], key)} for role, key in roles.items()], tools, set())
    rows = values[training.dataset_messages_key]
    if not isinstance(rows, list) or not rows:
        raise ValueError(f"expected a list of messages in column {training.dataset_messages_key}")
    messages = [_message(row, number) for number, row in enumerate(rows, 1)]
    not_trained = {index for index, message in enumerate(messages) if not _is_trained(message, index + 1)}
    if is_table:  # it has null for a key that other rows have
        messages, tools = _without_nulls(messages), _without_nulls(tools)
    return Row(messages, tools, not_trained)


def tools_of(value: Any) -> list[Any] | None:
    """Return the value of the column TOOLS, a list or its JSON; None if it has none. Raises ValueError for another."""
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise ValueError(f"column {TOOLS}: expected a list of tools, or its JSON, found other text") from None
    if value and not isinstance(value, list):
        raise ValueError(f"column {TOOLS}: expected a list of tools, or its JSON, found {type(value).__name__}")
    return value or None


def unread_keys(training: Training, messages: list[dict[str, Any]], source: str) -> set[str]:
    """Return the keys of messages that the source of a template does not mention."""
    keys = {key for message in messages for key in message} - {"role", "content", *TRAINED}
    words = set(re.findall(r"\w+", source))
    return {f"{training.dataset_messages_key}[].{key}" for key in keys if not words.issuperset(re.findall(r"\w+", key))}


def _message(row: Any, number: int) -> dict[str, Any]:
    """Return a message with the keys role and content, also of one that ShareGPT writes with "from" and "value"."""
    if isinstance(row, dict) and row.get("role") is None and isinstance(name := row.get("from"), str):
        rest = {key: value for key, value in row.items() if key not in ("role", "from", "value")}
        row = {"role": ROLES.get(name, name), "content": row.get("value"), **rest}
        if name == "function_call":
            problem = f'message {number}: "from": "function_call": write it as "role": "assistant" with "tool_calls"'
            raise ValueError(problem)
    if not isinstance(row, dict) or not isinstance(row.get("role"), str):
        problem = f'message {number}: expected an object with a string "role" and "content"'
        raise ValueError(f'{problem}, or with "from" and "value"')
    message = {key: value for key, value in row.items() if value is not None or key == "content"}
    content, has_more = row.get("content"), any(key not in ("role", "content", *TRAINED) for key in message)
    is_list = isinstance(content, list) and all(isinstance(part, dict) for part in content)
    if not is_list and (content is not None or not has_more):  # a list has the parts of a text, and tools may be called
        message["content"] = text_of(content, f"content of message {number}")
    return message


def _is_trained(message: dict[str, Any], number: int) -> bool:
    """Return whether a message of the assistant is trained on, and True for any other. Raises ValueError if a key says
    so in a way that is not supported."""
    for key in OTHER_MASKS:
        if key in message:
            problem = f'message {number}: the key "{key}" is not supported; write "train": true or false instead'
            raise ValueError(f"{problem}, and only for whole messages of the assistant")
    given = {key: message[key] for key in TRAINED if key in message}
    for key, value in given.items():
        if not isinstance(value, (bool, int, float)) or value not in (0, 1):
            raise ValueError(f"message {number}: {key} = {show(value)}: expected 0, 1, false or true")
        if value != next(iter(given.values())):
            raise ValueError(f"message {number}: {key} = {show(value)} contradicts its {next(iter(given))}; remove one")
        if value and message["role"] != "assistant":
            problem = f"message {number}: {key} = {show(value)}: only what the assistant says is trained on"
            raise ValueError(f"{problem}; remove it, or set it false")
    return message["role"] != "assistant" or all(given.values())


def _without_nulls(value: Any) -> Any:
    """Return a value without the keys of its objects that are null."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
