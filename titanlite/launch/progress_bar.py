"""Show the progress of planning: a bar on a terminal, lines (titanlite/launch/progress.py) otherwise."""

import contextlib
import functools
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from titanlite.launch.progress import progress


@contextlib.contextmanager
def progress_bar(description: str, *, total: int, unit: str, enabled: bool) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on standard error during the with block. The interface is the same as that of `progress`."""
    console = Console(stderr=True)
    if not (enabled and console.is_terminal):
        with progress(description, total=total, unit=unit, enabled=enabled) as advance:
            yield advance
        return
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn(unit)
    times = TimeElapsedColumn(), TextColumn("left:"), TimeRemainingColumn()
    with Progress(*columns, *times, console=console, transient=True) as bar:
        yield functools.partial(bar.advance, bar.add_task(description, total=total))
