"""Errors of a run that are not of its config."""


class TrainingError(Exception):
    """A run or a command cannot continue, though its config is right; the message is one line that says what happened,
    where and why."""
