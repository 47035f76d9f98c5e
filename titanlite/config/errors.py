"""Errors of a run whose config is right."""

from titanlite.config.loader import printable


class TrainingError(Exception):
    """A run or a command cannot continue, though its config is right; the message is one line: what, where and why."""

    def __str__(self) -> str:
        return printable(super().__str__())
