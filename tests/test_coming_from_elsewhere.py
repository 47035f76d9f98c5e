"""Each option that docs/coming_from_elsewhere.md gives for another program's name exists, and takes the value there."""

import re
from pathlib import Path

import pytest
from pydantic import BaseModel, ValidationError

from titanlite.config.loader import tomllib
from titanlite.config.schema import Config

PAGE = Path(__file__).parents[1] / "docs" / "coming_from_elsewhere.md"
WITHOUT_OPTION = re.compile(
    r"\bnone\b|\balways\b|\bas \[?\w|follows from|the same|the default|titanlite \w+|NGPU|SIGTERM|resume"
)
"""What the cell of a name says that has no option."""


def rows(text: str) -> list[list[str]]:
    """Return the cells of the page's tables, without heads and rules."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    cells = [re.split(r" \| ", line.strip("| ")) for line in lines]
    return [row for line, row in zip(lines, cells, strict=True) if "---" not in line and row[-1] != "titanlite"]


def problem(span: str) -> str:
    """Return what is wrong with an option in a code span, which may have a value; "" if nothing is."""
    name, _, value = span.partition(" = ")
    section: type[BaseModel] = Config
    for key in name.split("."):
        if not (isinstance(section, type) and issubclass(section, BaseModel)) or key not in section.model_fields:
            return f"{name}: unknown"
        section = section.model_fields[key].annotation
    if not value:
        return ""
    value = {"N": "2", "X": "0.5"}.get(value, value)
    try:
        Config.model_validate(tomllib.loads(f"{name} = {value}"))
    except (ValidationError, tomllib.TOMLDecodeError) as error:
        return f"{span}: {error}"
    return ""


def options(cell: str) -> list[str]:
    """Return the code spans of a cell that are options."""
    sections = "|".join(Config.model_fields)
    found = re.findall(r"`([^`]+)`", cell)
    return [span for span in found if re.match(rf"(?:{sections})\.\w", span) and span != "metrics.jsonl"]


def test_every_option_exists_and_takes_the_value():
    cells = [row[-1] for row in rows(PAGE.read_text())]
    spans = [span for cell in cells for span in options(cell)]
    assert len(spans) > 250
    assert [text for span in spans if (text := problem(span))] == []


def test_every_name_has_an_option_or_says_that_there_is_none():
    assert [row for row in rows(PAGE.read_text()) if not options(row[-1]) and not WITHOUT_OPTION.search(row[-1])] == []


@pytest.mark.parametrize(
    "span",
    ["training.stepz", "training.steps = -1", 'float8.recipe = "delayed"', "model.moe.experts = N", "model.dim.x"],
)
def test_a_wrong_option_is_found(span: str):
    assert options(f"some `{span}`") == [span]
    assert problem(span)


def test_no_name_stands_twice_in_a_table():
    """Whoever searches for a name finds one row for it, but for values of it, which have their own."""
    for table in PAGE.read_text().split("\n## ")[1:]:
        names = [name for row in rows(table) for name in re.findall(r"`([^`]+)`", row[0])]
        assert len(names) == len(set(names)), sorted(name for name in set(names) if names.count(name) > 1)
