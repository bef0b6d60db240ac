"""A small process that ends the ranks when the process that launched them is gone, even if that was killed.

It runs as a script without the site packages, so that it starts in milliseconds. Its argument is the job's private
folder. It reads process groups from its standard input, one a line; one with a minus sign is left alone again. If the
input ends without the line `done`, the launcher has died: then every group is killed and the folder removed. A group
has all processes that its ranks started. Ranks that are stopped or hang are killed too, which a watcher inside the rank
could not do.
"""

import contextlib
import os
import shutil
import signal
import sys


def main() -> None:
    """Read process groups until the input ends; kill them unless its last line is `done`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    groups: list[int] = []
    for line in sys.stdin:
        if line.strip() == "done":
            return
        number = int(line)
        groups.append(number) if number > 0 else groups.remove(-number)
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
    shutil.rmtree(sys.argv[1], ignore_errors=True)


if __name__ == "__main__":
    main()
