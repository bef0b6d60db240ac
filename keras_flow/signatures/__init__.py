"""Signatures: which layouts of inputs and outputs fit an operator, and which of them costs least.

`table` has the signatures of each operator on one placement axis, stated by kind of operator in `elementwise`,
`products`, `reductions`, `shapes` and `indices`. `choice` combines them over the axes and chooses by bytes.
"""

from keras_flow.signatures.call import OperatorCall as OperatorCall
from keras_flow.signatures.call import Signature as Signature
from keras_flow.signatures.choice import Choice as Choice
from keras_flow.signatures.choice import choose as choose
from keras_flow.signatures.table import signatures_on_axis as signatures_on_axis
