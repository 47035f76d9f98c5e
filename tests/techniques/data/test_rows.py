"""What a row of fine-tuning data has besides messages: tools, keys that mask a message, and what is not read."""

import itertools
import json
from typing import Any

import pytest
import transformers

from tests.helpers.data import rejection, training
from tests.techniques.data.test_fine_tuning import (
    ANSWERS,
    CONVERSATIONS,
    MARKED,
    PLAIN,
    SPECIAL_TOKENS,
    Opened,
    encoded,
    last_of,
    write_rows,
)
from titanlite.data.open import build_tokenizer
from titanlite.techniques.data.chat_template import ChatTemplate
from titanlite.techniques.data.rows import conversation_of, tools_of

TRAINED = ("train", "trainable", "training", "weight", "loss")
OTHER_MASKS = ("mask", "masked", "loss_mask", "loss_scale", "loss_weight", "train_detail", "training_detail")
TOOLS_TEMPLATE = "{% if tools %}{% for t in tools %}{{ t | tojson }}{% endfor %}{% endif %}" + PLAIN
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"city": None, "unit": "C"}}}


@pytest.fixture
def template(assets) -> Any:
    return lambda source: ChatTemplate(assets.open(**SPECIAL_TOKENS, chat_template=source))


def line_of(capsys: Any) -> list[str]:
    return [line for line in capsys.readouterr().out.splitlines() if "not read" in line]


def texts(
    open_template: Any, tmp_path: Any, rows: list[dict[str, Any]], source: str = PLAIN, suffix: str = ".jsonl", **how
):
    """The texts that are trained on."""
    tokenizer = open_template(source).tokenizer
    return sorted(
        Opened(tmp_path, tokenizer, write_rows(tmp_path / f"a{suffix}", rows), **how).trained_texts(tokenizer)
    )


@pytest.mark.parametrize("tools", [[WEATHER], json.dumps([WEATHER]), [], "", " \n", None], ids=str)
def test_the_column_tools_reaches_the_template(template, assets, tools):
    values = {"messages": CONVERSATIONS[0], "tools": tools}
    own = template(TOOLS_TEMPLATE)
    row = conversation_of(training_of("json"), values)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(assets.file), **SPECIAL_TOKENS)
    given = json.loads(tools.strip() or "null") if isinstance(tools, str) else tools or None
    theirs = tokenizer.apply_chat_template(
        CONVERSATIONS[0], tools=given, chat_template=TOOLS_TEMPLATE, tokenize=True, return_dict=False
    )
    (tokens,) = own.encode([last_of(own, row.messages, tools=row.tools)], "uint32")
    assert [token & 0x7FFFFFFF for token in tokens.tolist()] == theirs
    assert ("weather" in last_of(own, row.messages, tools=row.tools)) == bool(given)


def training_of(dataset: str) -> Any:
    return training(dataset=dataset, dataset_format="messages", packing="best_fit", document_mask=True)


def test_a_table_has_null_for_keys_that_other_rows_have():
    values = {"messages": [{"role": "assistant", "content": "a", "name": None}], "tools": [WEATHER]}
    for dataset, names in (("json", {"city", "unit"}), ("parquet", {"unit"})):
        row = conversation_of(training_of(dataset), values)
        assert row.tools[0]["function"]["parameters"].keys() == names
        assert row.messages == [{"role": "assistant", "content": "a"}]


@pytest.mark.parametrize("value", [{"name": "x"}, "[1", "soon", 3], ids=str)
def test_tools_that_are_no_list_are_one_line(value):
    with pytest.raises(ValueError, match=r"^column tools: expected a list of tools, or its JSON, found "):
        tools_of(value)


# Which messages are trained on ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", [PLAIN, MARKED], ids=["prefixes", "generation blocks"])
def test_a_message_that_is_masked_is_not_trained_on(template, tmp_path, source):
    user, rows, expected = {"role": "user", "content": "more?"}, [], []
    for key, value in itertools.product(TRAINED, (False, 0, 0.0, True, 1)):
        texts_of_row = [f"one {key} {value}", f"other {key} {value}"]
        first, other = ({"role": "assistant", "content": text} for text in texts_of_row)
        rows.append({"messages": [user, {**first, key: value}, user, other]})
        expected += [f"{text}</s>" for text in texts_of_row[0 if value else 1 :]]
    assert texts(template, tmp_path, rows, source) == sorted(expected)


def test_a_row_may_have_nothing_to_train_on(template, tmp_path):
    rows = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": 0}]}]
    assert texts(template, tmp_path, rows) == []


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ({"weight": 0.5}, "message 1: weight = 0.5: expected 0, 1, false or true"),
        ({"train": "no"}, 'message 1: train = "no": expected 0, 1, false or true'),
        ({"train": True, "weight": 0}, "message 1: train and weight contradict each other; remove one"),
        ({"role": "user", "train": True}, "message 1: train = true: only what the assistant says is trained on"),
        *(({key: [1]}, f'message 1: the key "{key}" is not supported; write "train"') for key in OTHER_MASKS),
        ({"role": None, "from": "function_call", "value": "{}"}, '"role": "assistant" with "tool_calls"'),
        (
            {"role": None, "from": "bot\x1b", "value": "a"},
            '"from": "bot\\u001b": expected one of human, gpt, chatgpt, ',
        ),
        ({"content": None, "value": "a"}, 'message 1: expected "content", or "tool_calls"; found only role, value'),
        ({"content": None, "text": "a"}, 'expected "content", or "tool_calls"; found only role, text'),
        ({"content": None, "audio": {"id": "a"}}, 'expected "content", or "tool_calls"; found only role, audio'),
        ({"content": None, "tool_calls": []}, 'expected "content", or "tool_calls"; found only role, tool_calls'),
        ({"role": None, "from": "gpt", "text": "a"}, 'expected "content", or "tool_calls"; found only role, text'),
        ({"role": None, "text": "a"}, 'expected an object with a string "role" and "content", or with "from"'),
    ],
    ids=str,
)
def test_what_is_not_supported_is_named(message, problem):
    values = {"messages": [{"role": "assistant", "content": "a", **message}]}
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the text is compared)
        conversation_of(training_of("json"), values)
    assert problem in str(caught.value)


def test_a_message_that_calls_tools_needs_no_content():
    calls = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    for message in (calls, {**calls, "content": None}):
        assert conversation_of(training_of("json"), {"messages": [message]}).messages == [calls]


@pytest.mark.parametrize("more", [{}, {"role": None, "content": None}], ids=["alone", "beside nulls"])
def test_conversations_of_sharegpt(template, tmp_path, more):
    names = {"system": "system", "user": "human", "assistant": "gpt"}
    rows = [
        {"conversations": [{"from": names[m["role"]], "value": m["content"], **more} for m in own]}
        for own in CONVERSATIONS
    ]
    assert texts(template, tmp_path, rows, dataset_messages_key="conversations") == sorted(ANSWERS)
    file = write_rows(tmp_path / "b.jsonl", rows)
    line = rejection(lambda: Opened(tmp_path, template(PLAIN).tokenizer, file))
    assert line.endswith('no column "messages"; it has conversations (training.dataset_messages_key)')


def test_what_is_not_read_is_named_once(template, assets, tmp_path, capsys):
    """Keys that the template mentions are read, and so are those that say which messages are trained on."""
    template(PLAIN + "{# the speaker, not the idea #}")
    tokenizer = build_tokenizer(str(assets.folder))  # in a process of its own
    own = {"speaker": "x", "odd\x1b": "y", "id": 1}
    messages = [{**m, **own, "weight": int(m["role"] == "assistant")} for m in CONVERSATIONS[0]]
    rows = [{"messages": messages, "tools": None, "parallel_tool_calls": True, "id": n} for n in range(30)]
    for suffix in (".jsonl", ".parquet"):
        file = write_rows(tmp_path / f"a{suffix}", rows)
        Opened(tmp_path, tokenizer, file)
        (line,) = line_of(capsys)
        names = '"id", "messages[].id", "messages[].odd\\u001b", "parallel_tool_calls"'
        assert line == f'training.dataset_path = "{file}": not read of its rows: {names}'
        Opened(tmp_path, tokenizer, file)
        assert line_of(capsys) == [], "the cache is there"


def test_columns_of_texts_that_are_not_read_are_named(assets, tmp_path, capsys):
    file = write_rows(tmp_path / "a.jsonl", [{"text": "some text", f"meta{n:02}": n} for n in range(25)])
    Opened(tmp_path, assets.open(**SPECIAL_TOKENS), file, dataset_format="text", document_mask=False)
    (line,) = line_of(capsys)
    assert '"meta00", "meta01"' in line
    assert line.endswith('"meta19" and 5 more')
    Opened(
        tmp_path,
        assets.open(**SPECIAL_TOKENS),
        write_rows(tmp_path / "b.jsonl", [{"text": "a"}]),
        dataset_format="text",
    )
    assert line_of(capsys) == []


def test_a_template_is_given_messages_with_their_keys(template):
    own: ChatTemplate = template(PLAIN.replace("{{ m.content | trim }}", "{{ m.content | trim }}{{ m.weight }}"))
    tokens, trained = encoded(own, [{"role": "assistant", "content": "a", "weight": 1}])
    assert "a1" in own.tokenizer.decode(tokens)
    assert sum(trained) == 3
