"""`Action`: one piece of work of a pipeline's step, and its text, which is torch's."""

from __future__ import annotations

import re
from typing import NamedTuple

from keras_flow.errors import FlowError

#: what a rank computes: forward; backward; and backward in two parts, by the inputs and by the weights
FORWARD, BACKWARD, INPUTS, WEIGHTS = "F", "B", "I", "W"
COMPUTED = (FORWARD, BACKWARD, INPUTS, WEIGHTS)
#: messages of a boundary between two stages: an activation, and its gradient
SEND_F, RECV_F, SEND_B, RECV_B = "SEND_F", "RECV_F", "SEND_B", "RECV_B"
#: the sum of a stage's gradients over the ranks that share it
REDUCE_GRAD = "REDUCE_GRAD"
#: what only torch's lists have: a stage's weights under FSDP are gathered, and let go
UNSHARD, RESHARD = "UNSHARD", "RESHARD"
_ONCE = (REDUCE_GRAD, UNSHARD, RESHARD)
_TEXT = re.compile(r"(\d+)(F|B|I|W|SEND_F|RECV_F|SEND_B|RECV_B|REDUCE_GRAD|UNSHARD|RESHARD)(\d*)")


class Action(NamedTuple):
    """One piece of work of one rank.

    Its text is that of `torch.distributed.pipelining`: `2F0` is the forward pass of micro-batch 0 through stage 2.

    Attributes:
        stage: the stage that computes, or whose message it is: `1SEND_F0` sends what stage 1 has computed, `1RECV_F0`
            receives what stage 1 needs.
        kind: `F` forward; `B` the whole backward pass, or `I`, gradients by the stage's inputs, and later `W`, by its
            weights.
        microbatch: which part of the batch; -1 for what is done once for all.

    Example:
        >>> str(Action(2, "F", 0)), Action.parse("1W7")
        ('2F0', Action(stage=1, kind='W', microbatch=7))
    """

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch if self.microbatch >= 0 else ''}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Read an action's text.

        Raises:
            FlowError: it is none.
        """
        found = _TEXT.fullmatch(text.strip())
        if found is None or (found[3] == "") != (found[2] in _ONCE):
            raise FlowError(
                f"{text!r} is no action of a schedule: stage, F, B, I or W, and micro-batch are expected, as in 2F0"
            )
        return cls(int(found[1]), found[2], int(found[3] or -1))
