"""The cases of the parity grid."""

from tests.parity.cases import layers, lifecycle, training

CASES = {case.name: case for case in (*layers.CASES, *training.CASES, *lifecycle.CASES)}
