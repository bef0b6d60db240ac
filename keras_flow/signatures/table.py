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

from keras_flow.layout import itemsize
from keras_flow.signatures import elementwise, indices, products, reductions, shapes
from keras_flow.signatures.call import OperatorCall, Signature
from keras_flow.signatures.registry import SIGNATURE_FUNCTIONS, B, P

#: the files of operators; each adds its own to the table as it is imported
KINDS = (elementwise, products, reductions, shapes, indices)


def signatures_on_axis(call: OperatorCall) -> list[Signature]:
    """The signatures of a call on one axis, the one of all broadcast last.

    A call of an operator that the table does not have gets that one alone.
    """
    function = SIGNATURE_FUNCTIONS.get(call.name)
    found = function(call) if function else ()
    signatures = dict.fromkeys(signature for signature in found if _adds_up(signature, call))
    signatures.setdefault(Signature((B,) * len(call.inputs), (B,) * len(call.outputs)))
    return list(signatures)


def _adds_up(signature: Signature, call: OperatorCall) -> bool:
    """Whether summands of an input that become summands of a result keep their sum when their dtype changes.

    They do only where the wider dtype holds every value. Whole numbers wrap: 3 as uint8 may be 254 and 5, whose mean in
    float32 is not that of 3. Fewer bits round each summand: 1000.25 and -1000 as bfloat16 are 1000 and -1000.
    """
    parts = list(zip((*signature.inputs, *signature.outputs), call.dtypes, strict=False))
    before = {dtype for part, dtype in parts[: len(call.inputs)] if part == P}
    after = {dtype for part, dtype in parts[len(call.inputs) :] if part == P}
    return all(
        source == target or ("int" not in source and source != "bool" and itemsize(target) >= 2 * itemsize(source))
        for source in before
        for target in after
    )
