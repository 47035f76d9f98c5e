"""Tables of test cases, most of which are nightly: skipped, except by `pytest -m nightly`."""

from collections.abc import Iterable, Mapping
from typing import Any

import pytest


class Case(dict[str, Any]):
    """The options of a case that says whether it runs every time. A plain dict is nightly."""

    def __init__(self, options: Mapping[str, Any], *, always: bool):
        super().__init__(options)
        self.always = always


def marks_for(options: Any) -> list[pytest.MarkDecorator]:
    """Return the marks for a case with these options: `nightly`, or none."""
    return [] if getattr(options, "always", False) else [pytest.mark.nightly]


def cases(
    arguments: str | tuple[str, ...], table: Iterable[Any], always: Iterable[Any] = (), **keywords: Any
) -> pytest.MarkDecorator:
    """Parametrize a test over the names of a table, or over a list. A case is nightly, except if its options are a Case
    that runs every time, or if it is in `always`: where options are no dict, or several tests share the table.

    Raises:
        ValueError: A case in `always` does not exist.
    """
    values, always, options = list(table), list(always), table if isinstance(table, Mapping) else {}
    if unknown := [each for each in always if each not in values]:
        raise ValueError(f"no such cases: {unknown}")
    marks = [[] if value in always else marks_for(options[value] if options else None) for value in values]
    several = [(value,) if isinstance(arguments, str) else value for value in values]
    parameters = [pytest.param(*value, marks=own) for value, own in zip(several, marks, strict=True)]
    return pytest.mark.parametrize(arguments, parameters, **keywords)
