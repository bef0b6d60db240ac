"""The table of signatures: for each operator, the layouts of inputs and outputs that fit on one placement axis.

A signature fits if the operator, run by each rank on its shards, gives the shards of the logical result. The signatures
follow OneFlow's (`GetSbp` of its operators); those of linear operators are completed: P passes through whatever is
linear in an argument while the others are broadcast. `tests/signatures/test_table.py` checks each one by running it.

>>> from keras_flow.signatures.call import OperatorCall
>>> product = OperatorCall("matmul", inputs=((4, 6), (6, 8)), outputs=((4, 8),))
>>> [str(signature) for signature in signatures_on_axis(product)]
['(S(0),B) -> (S(0))', '(S(1),S(0)) -> (P)', '(B,S(1)) -> (S(1))', '(P,B) -> (P)', '(B,P) -> (P)', '(B,B) -> (B)']
"""

from __future__ import annotations

from keras_flow.signatures import elementwise, indices, products, reductions, shapes
from keras_flow.signatures.call import OperatorCall, Signature
from keras_flow.signatures.registry import SIGNATURE_FUNCTIONS, B

#: the files of operators; each adds its own to the table as it is imported
KINDS = (elementwise, products, reductions, shapes, indices)


def signatures_on_axis(call: OperatorCall) -> list[Signature]:
    """The signatures of a call on one axis, the one of all broadcast last.

    A call of an operator that the table does not have gets that one alone.
    """
    function = SIGNATURE_FUNCTIONS.get(call.name)
    signatures = dict.fromkeys(function(call) if function else ())
    signatures.setdefault(Signature((B,) * len(call.inputs), (B,) * len(call.outputs)))
    return list(signatures)
