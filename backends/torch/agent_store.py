"""The store of torchrun's agent, which listens at MASTER_ADDR and MASTER_PORT in place of process 0.

Also run as a script, in a process of its own, for engines that must not load torch (`backends/held_port.py`):
`agent_store.py RANK WORLD_SIZE SECONDS set|get KEY [VALUE]`; `get` prints the value.
"""

from __future__ import annotations

import datetime
import socket
import sys
import time

import torch.distributed as torch_distributed
from torch.distributed.rendezvous import rendezvous

#: seconds between two looks for an address at which somebody listens
_PAUSE_SECONDS = 0.2


def connect(rank: int, size: int, seconds: float) -> torch_distributed.Store:  # pyright: ignore[reportPrivateImportUsage]
    """Connect to the store as torch's own rendezvous by environment variables does."""
    limit = datetime.timedelta(seconds=seconds)
    store, *_ = next(iter(rendezvous("env://", rank=rank, world_size=size, timeout=limit)))
    return store


def main() -> None:
    """Write an address into the store, or wait for one at which somebody listens; of an attempt before nobody does."""
    rank, size, seconds, action, key, *values = sys.argv[1:]
    until = time.monotonic() + float(seconds)
    store = connect(int(rank), int(size), float(seconds))
    if action == "set":
        store.set(key, values[0])
        return
    while True:
        host, _, port = store.get(key).decode().rpartition(":")
        try:
            socket.create_connection((host, int(port)), max(0.1, until - time.monotonic())).close()
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(_PAUSE_SECONDS)
            continue
        print(f"{host}:{port}")
        return


if __name__ == "__main__":
    main()
