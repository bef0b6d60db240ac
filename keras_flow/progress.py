"""A line that shows that work goes on, for whatever takes longer than two seconds.

In terminals and notebooks it moves and is gone at the end; where output is neither, nothing is written.
"""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

#: work that is over before this shows nothing
AFTER_SECONDS = 2.0


def is_seen(console: Console) -> bool:
    """Whether what moves is seen: in a terminal, or in a notebook that has ipywidgets, by which rich draws there."""
    if console.quiet:
        return False
    return console.is_terminal or (console.is_jupyter and importlib.util.find_spec("ipywidgets") is not None)


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
    if not is_seen(console):
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
