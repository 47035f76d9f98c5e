"""Errors of a run that are not of its config, and texts that a terminal may show."""

import re

_CONTROLS = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""What moves a cursor or starts a terminal's escape sequence, changes a text's direction, or is not UTF-8."""


def printable(text: str, keep: str = "") -> str:
    """Return a text with its control characters as escapes, as in \\x1b, so that a terminal shows what was written.
    Those in `keep` remain."""
    return _CONTROLS.sub(lambda found: found[0] if found[0] in keep else ascii(found[0])[1:-1], text)


class TrainingError(Exception):
    """A run or a command cannot continue, though its config is right; the message is one line that says what happened,
    where and why."""

    def __str__(self) -> str:
        return printable(super().__str__())
