"""`kf.comm`: collectives of tensors that each rank has for itself, as in `oneflow.comm` and torch.distributed.

A process that drives one rank (torch; `keras-flow launch --nproc_per_node` elsewhere) gives its tensor and gets one. A
process that drives several gives and gets a mapping, rank -> tensor. Nothing is written in place: results are returned.

Example:
    >>> import keras_flow as kf
    >>> ranks = kf.init(4)
    >>> kf.comm.all_reduce({rank: [1.0, rank] for rank in range(4)})[0]
    Array([4., 6.], dtype=float32)
"""

from keras_flow.comm.movements import all_gather as all_gather
from keras_flow.comm.movements import all_gather_into_tensor as all_gather_into_tensor
from keras_flow.comm.movements import all_to_all as all_to_all
from keras_flow.comm.movements import barrier as barrier
from keras_flow.comm.movements import broadcast as broadcast
from keras_flow.comm.movements import gather as gather
from keras_flow.comm.movements import scatter as scatter
from keras_flow.comm.objects import all_gather_object as all_gather_object
from keras_flow.comm.objects import broadcast_object as broadcast_object
from keras_flow.comm.point_to_point import recv as recv
from keras_flow.comm.point_to_point import send as send
from keras_flow.comm.reductions import all_reduce as all_reduce
from keras_flow.comm.reductions import reduce as reduce
from keras_flow.comm.reductions import reduce_scatter as reduce_scatter
from keras_flow.comm.reductions import reduce_scatter_tensor as reduce_scatter_tensor
from keras_flow.comm.work import Work as Work
