"""A small process that ends the ranks when the process that launched them is gone, killed even.

Run as a script, without the site packages, so that it starts in milliseconds; its argument is the job's private folder,
which is removed then too. It reads process groups, one a line, from
its standard input. The end of the input without the line `done` means that the launcher died: every group is killed,
with whatever its ranks started and also when they are stopped or hang, which a watcher inside the rank could not do.
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
        groups.append(int(line))
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
    shutil.rmtree(sys.argv[1], ignore_errors=True)


if __name__ == "__main__":
    main()
