"""The error of a run that fails although its config is right."""

from titanlite.config.loader import printable


class TrainingError(Exception):
    """A run or command cannot continue although its config is right; the message is one line: what, where and why."""

    def __str__(self) -> str:
        return printable(super().__str__())
