"""`kf.schedules`: in which order the ranks of a pipeline compute stages and micro-batches, as values.

A schedule says what each rank does: `2F0` is the forward pass of micro-batch 0 through stage 2, `B` the backward pass,
or `I` and `W` its two parts, by the inputs and by the weights. How long a step takes, what is idle and what a rank
holds follow from it.

Example:
    >>> from keras_flow import schedules
    >>> schedule = schedules.zbv(ranks=4, microbatches=8)
    >>> schedule.makespan(), round(schedule.bubble(), 3), schedule.peak(rank=0)
    (25.5, 0.059, 4.0)
"""

from keras_flow.schedules.action import Action as Action
from keras_flow.schedules.automatic import auto as auto
from keras_flow.schedules.automatic import bound as bound
from keras_flow.schedules.schedule import Schedule as Schedule
from keras_flow.schedules.schedule import from_csv as from_csv
from keras_flow.schedules.tables import gpipe as gpipe
from keras_flow.schedules.tables import gpipe_on as gpipe_on
from keras_flow.schedules.tables import interleaved as interleaved
from keras_flow.schedules.tables import one_f_one_b as one_f_one_b
from keras_flow.schedules.tables import zb1p as zb1p
from keras_flow.schedules.tables import zbv as zbv
