"""Signatures: which layouts of inputs and outputs fit an operator, and which of them costs least."""

from keras_flow.signatures.call import OperatorCall as OperatorCall
from keras_flow.signatures.call import Signature as Signature
from keras_flow.signatures.choice import Choice as Choice
from keras_flow.signatures.choice import choose as choose
from keras_flow.signatures.table import rows_of as rows_of
