"""Global tensors: one logical tensor on the ranks of a placement, and the operators of `keras.ops` on them."""
