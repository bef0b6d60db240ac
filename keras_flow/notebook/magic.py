"""The magic `%%ranks`: a cell that begins with it runs on all ranks."""

from __future__ import annotations

from typing import Any

from IPython.core.error import UsageError
from IPython.core.getipython import get_ipython
from IPython.core.magic_arguments import argument, magic_arguments, parse_argstring

from keras_flow.errors import FlowError
from keras_flow.notebook import session


def register() -> None:
    """Make the magic known to the shell; without a shell (a script) nothing happens."""
    shell: Any = get_ipython()
    if shell is not None:
        shell.register_magic_function(ranks, "cell", "ranks")


@magic_arguments()
@argument("--rank", default=None, help="only on these ranks: 0, or 0,2")
@argument("--quiet", action="store_true", help="show what the cell prints only if it fails")
@argument("--timeout", type=float, default=None, help="seconds without progress after which the cell is deadlocked")
def ranks(line: str, cell: str) -> None:
    """Run a cell on all ranks."""
    options = parse_argstring(ranks, line)
    chosen = None
    if options.rank is not None:
        try:
            chosen = [int(part) for part in str(options.rank).split(",")]
        except ValueError:
            raise UsageError(f"%%ranks --rank {options.rank}: legal is a rank, or several: --rank 0,2") from None
    try:
        # a line in the place of the magic: tracebacks then count lines as the notebook does
        session.run_cell(f"# %%ranks {line}\n{cell}", ranks=chosen, quiet=options.quiet, timeout=options.timeout)
    except FlowError as error:
        if type(error) is FlowError:  # a wrong use, whose traceback says nothing
            raise UsageError(str(error)) from None
        raise
