"""Horovod's names for Keras 3: `import keras_flow.hvd as hvd`.

Each process is a rank with data of its own, trained by stock `fit`; the optimizer averages gradients over the ranks.
`batch_size` is that of a rank. A distribution of keras_flow does not go beside it.

Example:
    >>> import keras_flow.hvd as hvd
    >>> hvd.init()
    >>> hvd.rank(), hvd.size(), hvd.local_rank()
    (0, 1, 0)
"""

from typing import NoReturn as _NoReturn

from keras_flow.hvd import callbacks as callbacks
from keras_flow.hvd import elastic as elastic
from keras_flow.hvd.agreed import join as join
from keras_flow.hvd.collectives import Adasum as Adasum
from keras_flow.hvd.collectives import Average as Average
from keras_flow.hvd.collectives import AverageOfPresent as AverageOfPresent
from keras_flow.hvd.collectives import Max as Max
from keras_flow.hvd.collectives import Min as Min
from keras_flow.hvd.collectives import Product as Product
from keras_flow.hvd.collectives import Sum as Sum
from keras_flow.hvd.collectives import allgather as allgather
from keras_flow.hvd.collectives import allgather_object as allgather_object
from keras_flow.hvd.collectives import allreduce as allreduce
from keras_flow.hvd.collectives import alltoall as alltoall
from keras_flow.hvd.collectives import barrier as barrier
from keras_flow.hvd.collectives import broadcast as broadcast
from keras_flow.hvd.collectives import broadcast_object as broadcast_object
from keras_flow.hvd.collectives import grouped_allreduce as grouped_allreduce
from keras_flow.hvd.collectives import reducescatter as reducescatter
from keras_flow.hvd.compression import Compression as Compression
from keras_flow.hvd.optimizer import DistributedOptimizer as DistributedOptimizer
from keras_flow.hvd.optimizer import PartialDistributedOptimizer as PartialDistributedOptimizer
from keras_flow.hvd.ranks import ProcessSet as ProcessSet
from keras_flow.hvd.ranks import add_process_set as add_process_set
from keras_flow.hvd.ranks import cross_rank as cross_rank
from keras_flow.hvd.ranks import cross_size as cross_size
from keras_flow.hvd.ranks import global_process_set as global_process_set
from keras_flow.hvd.ranks import init as init
from keras_flow.hvd.ranks import is_homogeneous as is_homogeneous
from keras_flow.hvd.ranks import is_initialized as is_initialized
from keras_flow.hvd.ranks import local_rank as local_rank
from keras_flow.hvd.ranks import local_size as local_size
from keras_flow.hvd.ranks import rank as rank
from keras_flow.hvd.ranks import remove_process_set as remove_process_set
from keras_flow.hvd.ranks import shutdown as shutdown
from keras_flow.hvd.ranks import size as size
from keras_flow.hvd.refused import refuse as _refuse
from keras_flow.hvd.variables import broadcast_variables as broadcast_variables
from keras_flow.hvd.variables import load_model as load_model
from keras_flow.hvd.variables import run as run


def __getattr__(name: str) -> _NoReturn:
    _refuse(name)
