"""Strategies of hypothesis: valid inputs, damaged as a crash, an editor or an attacker might damage them."""

import copy
import json
import re
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

from titanlite.config.loader import tomllib

RAW = {"<deep>": "[" * 100_000, "<deep object>": '{"a":' * 100_000, "<digits>": "9" * 5000, "<huge>": "1e999"}
"""Texts that no value has, by the string that stands for them until the JSON or the TOML is written."""
INTEGERS = [0, 1, -1, 2, 3, 7, 64, 2**31 - 1, 2**31, 2**53 + 1, 2**63 - 1, 2**63, 2**64, -(2**63), 10**300]
FLOATS = [0.5, -0.0, 1e-320, 1e-9, 1e308, -1e308, float("nan"), float("inf"), float("-inf")]
TEXTS = ["", " ", "a\nb", "\x1b[2J", "\0", "\x7f", "\x85", "\u2028", "\u202e", "\ud800", "é", "../..", "/dev/zero"]
HOSTILE = st.one_of(
    st.sampled_from([None, True, False, [], {}, [[]], [None], {"": None}]),
    st.sampled_from([*INTEGERS, *FLOATS, *TEXTS, *RAW]),
    st.integers(-3, 70),
    st.text(max_size=8),
)


def to_json(value: Any, *, ascii_only: bool = True) -> bytes:
    """Return a value as JSON, with the texts of RAW."""
    text = json.dumps(value, ensure_ascii=ascii_only)
    for name, raw in RAW.items():
        text = text.replace(json.dumps(name), raw)
    return text.encode("utf-8", "surrogatepass")


TOML = st.one_of(
    HOSTILE.filter(lambda value: value is not None).map(to_json),
    st.sampled_from([b"nan", b"-inf", b"0x10", b"1979-05-27", b"07:32:00", b"[{}]", b"{a = 1}", b'"""a\nb"""', b"x"]),
)
"""Values of a TOML file."""
FRAGMENTS = [text.encode("utf-8", "surrogatepass") for text in [*TEXTS, *RAW.values(), *'[]{}",:=#\\']]
FRAGMENTS += [b"\xff", b"\xef\xbb\xbf", b"\r", b"\r\n", b"NaN", b"null", b"1e999", b"\0" * 4096]


def _places(container: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each list or object in a value, and each of its keys."""
    for key, value in list(container.items() if isinstance(container, dict) else enumerate(container)):
        yield container, key
        if isinstance(value, (dict, list)):
            yield from _places(value)


HOW = ["replace", "change", "change", "change", "exchange", "liken", "delete", "add", "add"]


@st.composite
def changed(draw: Any, value: Any) -> Any:
    """Return a JSON value in which some values are replaced, deleted, repeated, exchanged, in another order, a little
    wrong, or those of a sibling: of two slices with their offsets, the second may get the first one's offset."""
    top = [copy.deepcopy(value)]
    for _ in range(draw(st.sampled_from([1, 1, 1, 2, 3]))):
        places = list(_places(top))
        container, key = places[draw(st.integers(0, len(places) - 1))]
        other, other_key = places[draw(st.integers(0, len(places) - 1))]
        how, old = draw(st.sampled_from(HOW)), container[key]
        if how == "change" and type(old) in (int, float):
            container[key] = draw(st.sampled_from([old + 1, old - 1, -old, float(old), str(old)]))
        elif how == "change" and isinstance(old, list):
            container[key] = draw(st.permutations(old))
        elif how == "exchange":
            container[key] = copy.deepcopy(other[other_key])
        elif how == "liken":
            siblings = [own[key] for own, name in places if name == key and type(own[key]) is type(old)]
            container[key] = copy.deepcopy(draw(st.sampled_from(siblings)))
        elif how == "delete" and container is not top:
            del container[key]
        elif how == "add" and isinstance(container, dict):
            container[draw(st.one_of(st.sampled_from(TEXTS), st.text(max_size=4)))] = old
        elif how == "add":
            container.insert(key, copy.deepcopy(old))
        else:
            container[key] = copy.deepcopy(draw(HOSTILE))
    return top[0]


@st.composite
def damaged(draw: Any, data: bytes) -> bytes:
    """Return bytes of which some are flipped, cut out, repeated or inserted."""
    for _ in range(draw(st.integers(1, 3))):
        begin = draw(st.integers(0, len(data)))
        end = min(begin + draw(st.one_of(st.integers(0, 40), st.just(len(data)))), len(data))
        how = draw(st.sampled_from(["flip", "cut", "repeat", "insert", "replace"]))
        if how == "flip" and begin < len(data):
            data = data[:begin] + bytes([data[begin] ^ 2 ** draw(st.integers(0, 7))]) + data[begin + 1 :]
        elif how == "cut":
            data = data[:begin] + data[end:]
        elif how == "repeat":
            data = data[:end] + data[begin:]
        else:
            inserted = draw(st.one_of(st.sampled_from(FRAGMENTS), st.binary(max_size=8)))
            data = data[:begin] + inserted + data[end if how == "replace" else begin :]
    return data


def json_files(value: Any) -> st.SearchStrategy[bytes]:
    """Return files like the one with a JSON value."""
    return st.one_of(st.builds(to_json, changed(value), ascii_only=st.booleans()), damaged(to_json(value)))


def to_toml(value: Any) -> bytes:
    """Return a table as TOML, with the texts of RAW; what is nested in it is on the line of its key."""

    def text(inner: Any) -> str:
        if isinstance(inner, dict):
            return f"{{{', '.join(f'{json.dumps(key)} = {text(each)}' for key, each in inner.items())}}}"
        if isinstance(inner, list):
            return f"[{', '.join(map(text, inner))}]"
        return to_json(inner).decode().replace("Infinity", "inf").replace("NaN", "nan")

    return "".join(f"{json.dumps(key)} = {text(each)}\n" for key, each in value.items()).encode()


def toml_files(data: bytes) -> st.SearchStrategy[bytes]:
    """Return files like a TOML file, in which some words, numbers, strings and lists are others, or whose tables and
    lists are changed as those of JSON."""
    patterns = (rb'"[^"]*"|[-+.\w]+', rb"\[.*\]")
    words = [match.span() for pattern in patterns for match in re.finditer(pattern, data)]

    def replaced(items: list[tuple[tuple[int, int], bytes]]) -> bytes:
        text = data
        for (begin, end), word in sorted(items, reverse=True):
            text = text[:begin] + word + text[end:]
        return text

    tables = changed(tomllib.loads(data.decode())).filter(lambda value: isinstance(value, dict)).map(to_toml)
    return st.one_of(st.lists(st.tuples(st.sampled_from(words), TOML), max_size=3).map(replaced), tables, damaged(data))


def safetensors_files(data: bytes) -> st.SearchStrategy[bytes]:
    """Return files like a safetensors file: its header is changed as JSON, also the JSON in its strings, or bytes."""
    begin = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:begin])
    headers = [json_files(header)]
    for key, text in header.get("__metadata__", {}).items():
        texts = json_files(json.loads(text)).map(lambda own: own.decode(errors="replace"))
        headers.append(texts.map(lambda text, key=key: to_json({**header, "__metadata__": {key: text}})))
    whole = st.one_of(headers).map(lambda text: len(text).to_bytes(8, "little") + text + data[begin:])
    return st.one_of(whole, damaged(data))
