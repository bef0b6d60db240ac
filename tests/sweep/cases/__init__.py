"""The pieces of every public name, and the names that have none, with the reason."""

from tests.sweep.cases import layers, ops, training
from tests.sweep.piece import Piece

PIECES: dict[str, Piece] = {piece.name: piece for piece in (*ops.PIECES, *layers.PIECES, *training.PIECES)}
#: public name -> why it is not trained in a layer
WITHOUT: dict[str, str] = {**ops.WITHOUT, **layers.WITHOUT, **training.WITHOUT}
