"""Show the progress of planning: a bar on a terminal, lines (titanlite/launch/progress.py) otherwise."""

import contextlib
import functools
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from titanlite.launch.progress import progress


@contextlib.contextmanager
def progress_bar(description: str, *, total: int, unit: str, enabled: bool) -> Iterator[Callable[[int], None]]:
    """Show the progress of the with block on standard error, with arguments and a yielded function as of `progress`."""
    console = Console(stderr=True)
    if not (enabled and console.is_terminal):
        with progress(description, total=total, unit=unit, enabled=enabled) as advance:
            yield advance
        return
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn(unit)
    times = TimeElapsedColumn(), TextColumn("left:"), TimeRemainingColumn()
    with Progress(*columns, *times, console=console, transient=True) as bar:
        yield functools.partial(bar.advance, bar.add_task(description, total=total))
