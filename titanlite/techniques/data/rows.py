"""Read the messages and tools of a conversation from a dataset row, and find out which messages are trained on."""

import contextlib
import json
import re
from collections.abc import Collection
from typing import Any, NamedTuple

from titanlite.config.loader import show
from titanlite.config.schema import Training
from titanlite.data.documents import text_of
from titanlite.data.files import TOOLS

ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant", "observation": "tool"}
ROLES |= {role: role for role in ("system", "user", "assistant", "tool")}
"""Roles of messages, by the names in ShareGPT's key "from"."""
TRAINED = ("train", "trainable", "training", "weight", "loss")
"""Keys of axolotl, OpenAI and ms-swift that tell whether a message is trained on (true, 1) or not (false, 0)."""
KEYS = ("role", "content", *TRAINED)
"""Keys of a message that titanlite reads. The chat template may read more keys."""
OTHER_MASKS = ("mask", "masked", "loss_mask", "loss_scale", "loss_weight", "train_detail", "training_detail")
"""Keys by which other programs mask or weight a message, which titanlite does not support."""


class Row(NamedTuple):
    """A conversation. `not_trained`: indices of the assistant's messages that are excluded from training."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None = None
    not_trained: Collection[int] = ()


def conversation_of(training: Training, values: dict[str, Any]) -> Row:
    """Return the conversation of a row with columns `values`. Raises ValueError if there is no conversation."""
    if training.dataset != "json":  # Parquet and Arrow store null for a key that a row lacks
        values = _without_nulls(values)
    tools = tools_of(values.get(TOOLS))
    if training.dataset_format == "prompt_response":
        roles = {"user": training.dataset_prompt_key, "assistant": training.dataset_response_key}
        messages = [{"role": role, "content": text_of(values.get(key), key)} for role, key in roles.items()]
        return Row(messages, tools)
    rows = values.get(training.dataset_messages_key)
    if not isinstance(rows, list) or not rows:
        raise ValueError(f"expected a list of messages in column {training.dataset_messages_key}")
    messages = [_message(row, number) for number, row in enumerate(rows, 1)]
    return Row(messages, tools, {i for i, message in enumerate(messages) if not _is_trained(message, i + 1)})


def tools_of(value: Any) -> list[Any] | None:
    """Return the tools in column TOOLS, a list or JSON; None without tools. Raises ValueError for other values."""
    with contextlib.suppress(ValueError, RecursionError):
        value = json.loads(value.strip() or "null") if isinstance(value, str) else value
    if value and not isinstance(value, list):
        raise ValueError(f"column {TOOLS}: expected a list of tools, or its JSON, found {show(value)[:40]}")
    return value or None


def unread_keys(training: Training, messages: list[dict[str, Any]], words: frozenset[str]) -> set[str]:
    """Return the keys of `messages` that a chat template does not contain. `words`: the words of its source."""
    keys = {key for message in messages for key in message} - words
    return {f"{training.dataset_messages_key}[].{key}" for key in keys if not words.issuperset(re.findall(r"\w+", key))}


def _message(row: Any, number: int) -> dict[str, Any]:
    """Return a message with the keys role and content. ShareGPT's "from" and "value" become role and content."""
    if isinstance(row, dict) and row.get("role") is None and isinstance(name := row.get("from"), str):
        if name not in ROLES:
            problem = f'message {number}: "from": {show(name)[:40]}: expected one of {", ".join(ROLES)}'
            raise ValueError(f'{problem}; write others with "role", as "role": "assistant" with "tool_calls"')
        rest = {key: value for key, value in row.items() if key not in ("from", "value")}
        row = {**rest, "role": ROLES[name], "content": row.get("value")}
    if not isinstance(row, dict) or not isinstance(row.get("role"), str):
        problem = f'message {number}: expected an object with a string "role" and "content"'
        raise ValueError(f'{problem}, or with "from" and "value"')
    message = {key: value for key, value in row.items() if value is not None}
    content = message.get("content")
    if content is None and not message.get("tool_calls"):
        raise ValueError(f'message {number}: expected "content", or "tool_calls"; found only {", ".join(message)}')
    is_list = isinstance(content, list) and all(isinstance(part, dict) for part in content)
    if content is not None and not is_list:  # a list of parts goes to the template unchanged
        message["content"] = text_of(content, f"content of message {number}")
    return message


def _is_trained(message: dict[str, Any], number: int) -> bool:
    """Return whether the keys of a message allow training on it. Raises ValueError for unsupported keys or values."""
    for key in OTHER_MASKS:
        if key in message:
            problem = f'message {number}: the key "{key}" is not supported; write "train": true or false instead'
            raise ValueError(f"{problem}, and only for whole messages of the assistant")
    given = {key: message[key] for key in TRAINED if key in message}
    for key, value in given.items():
        if not isinstance(value, (bool, int, float)) or value not in (0, 1):
            raise ValueError(f"message {number}: {key} = {show(value)}: expected 0, 1, false or true")
        if value and message["role"] != "assistant":
            problem = f"message {number}: {key} = {show(value)}: only what the assistant says is trained on"
            raise ValueError(f"{problem}; remove it, or set it false")
    if len(set(map(bool, given.values()))) > 1:
        raise ValueError(f"message {number}: {' and '.join(given)} contradict each other; remove one")
    return message["role"] != "assistant" or all(given.values())


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
