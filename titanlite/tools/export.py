"""Run `titanlite export`, with --verify."""

from pathlib import Path

from titanlite.checkpoint import export

__doc__ = export.__doc__  # the page of commands shows it


def main(argv: list[str]) -> int:
    """Run `titanlite export`. Returns the exit status."""
    return export.main(argv, verify)


def verify(checkpoint: Path, out: Path) -> bool:
    from titanlite.tools import verify_export  # here, since --help and an export need no model

    return verify_export.verify(checkpoint, out)
