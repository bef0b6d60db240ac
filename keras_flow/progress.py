"""A line that shows that work goes on, for whatever takes longer than two seconds.

In terminals and notebooks it moves and is gone at the end; where output is neither, nothing is written.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

#: work that is over before this shows nothing
AFTER_SECONDS = 2.0


@contextmanager
def working(what: str, console: Console | None = None) -> Iterator[Callable[[str], None]]:
    """Show `what`, with the time it takes, while the body runs.

    Args:
        what: what is being done.
        console: where; None: standard error, or the notebook.

    Yields:
        A function that changes the text.

    Example:
        >>> with working("reading") as tell:
        ...     tell("reading the second half")  # over at once: nothing is shown
    """
    console = console or Console(stderr=True)
    if not (console.is_terminal or console.is_jupyter):
        yield lambda text: None
        return
    bar = Progress(
        SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=console, transient=True
    )
    task = bar.add_task(what, total=None)
    timer = threading.Timer(AFTER_SECONDS, bar.start)
    timer.daemon = True
    timer.start()
    try:
        yield lambda text: bar.update(task, description=text)
    finally:
        timer.cancel()
        timer.join()  # it may be starting just now
        bar.stop()
