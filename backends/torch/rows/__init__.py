"""Each rank computes its own rows, on plain tensors, where a layer acts row by row; DTensor costs time per operator.

mirrored_calls     a layer's call in the mirrored view: its inputs are cut to this rank's rows
consistent_calls   a layer's call in the consistent view, between operators on DTensors
split_rows         what such a call hands back: a logical tensor of which a rank holds its rows
partial_numbers    a sum over the own rows, which waits for who asks for it
losses, metrics    add up over the own rows
log_readers        who reads the logs of a step, and on which ranks
"""
