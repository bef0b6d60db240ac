"""The cases of the parity grid."""

from tests.parity.cases import layers, lifecycle, plain, training

CASES = {case.name: case for case in (*layers.CASES, *plain.CASES, *training.CASES, *lifecycle.CASES)}
