"""Do all ranks call the same operators in the same order? Compared before ranks wait for each other.

A rank that boxes notes what it did since it last did; the first rank there writes it into the job's store, the others
compare. So a program whose ranks differ ends with the first differing call, and not in a hang.
"""

from __future__ import annotations

import hashlib

import torch.distributed as dist

from keras_flow.backends.torch.devices import world
from keras_flow.errors import FlowError

#: calls kept as texts of those since the last exchange; of earlier ones a digest
_KEPT = 200
#: entries that stay in the store
_LAG = 1000

_calls: list[str] = []
_number = 0
_skipped = 0
_digest = b""


def note(call: str) -> None:
    """An operator was called."""
    global _skipped, _digest
    _calls.append(call)
    if len(_calls) > _KEPT:
        _digest = hashlib.blake2b(_digest + _calls.pop(0).encode(), digest_size=8).digest()
        _skipped += 1


def begin_anew() -> None:
    """Forget what was called, after ranks were stopped in different places."""
    global _number, _skipped, _digest
    _calls.clear()
    _number, _skipped, _digest = 0, 0, b""


def check(exchange: str) -> None:
    """Before an exchange that every rank takes part in.

    Raises:
        FlowError: another rank called something else; it names the first differing call.
    """
    global _number, _skipped, _digest
    # one process cannot differ from itself
    if world().process_count == 1:
        return
    store = dist.distributed_c10d._get_default_store()  # private: torch 2.13 has no public name for the job's store
    mine = [f"{_skipped} calls before the last {_KEPT}, together {_digest.hex()}", *_calls, exchange]
    _calls.clear()
    _skipped, _digest = 0, b""
    _number += 1
    # the first rank to arrive writes its list, the others get that back
    first_calls = store.compare_set(f"keras_flow/sequence/{_number}", "", "\n".join(mine)).decode().split("\n")
    # a rank is never so far behind: each of these exchanges waits for all
    if _number > _LAG and world().local_ranks[0] == 0:
        store.delete_key(f"keras_flow/sequence/{_number - _LAG}")
    if first_calls != mine:
        place = next((k for k, pair in enumerate(zip(first_calls, mine, strict=False)) if pair[0] != pair[1]), -1)
        theirs, ours = (
            calls[place] if -len(calls) <= place < len(calls) else "(no more)" for calls in (first_calls, mine)
        )
        raise FlowError(
            f"ranks call different operators: rank {world().local_ranks[0]} calls {ours!r} where another rank calls "
            f"{theirs!r}. Every rank must call every operator on global tensors, in the same order; look for an "
            "`if` on the rank, or on a value that differs between ranks"
        )
