"""Errors of a run that are not of its config."""


class TrainingError(Exception):
    """Training cannot continue; the message is one line that says what happened, where and why."""
