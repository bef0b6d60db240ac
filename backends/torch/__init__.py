"""PyTorch: DTensors for the consistent view, local tensors for data parallel; one process per rank.

This module is the backend: it has the names of `keras_flow.backends.interface.Backend`.
"""

from typing import TYPE_CHECKING

from keras_flow.backends.rendezvous.agreement import agree_on as agree_on
from keras_flow.backends.torch.boxing import redistribute as redistribute
from keras_flow.backends.torch.capabilities import capabilities as capabilities
from keras_flow.backends.torch.collectives import exchange as exchange
from keras_flow.backends.torch.collectives import fold as fold
from keras_flow.backends.torch.collectives import gather_all as gather_all
from keras_flow.backends.torch.collectives import is_recorded as is_recorded
from keras_flow.backends.torch.collectives import join as join
from keras_flow.backends.torch.collectives import key_of as key_of
from keras_flow.backends.torch.collectives import native as native
from keras_flow.backends.torch.collectives import reshape as reshape
from keras_flow.backends.torch.collectives import shape as shape
from keras_flow.backends.torch.collectives import with_gradient as with_gradient
from keras_flow.backends.torch.collectives import without_gradient as without_gradient
from keras_flow.backends.torch.devices import init as init
from keras_flow.backends.torch.devices import simulate as simulate
from keras_flow.backends.torch.devices import world as world
from keras_flow.backends.torch.direct_collectives import direct as direct
from keras_flow.backends.torch.exporting import plain_value as plain_value
from keras_flow.backends.torch.exporting import track as track
from keras_flow.backends.torch.generation import generate_function as generate_function
from keras_flow.backends.torch.hooks import hooks as hooks
from keras_flow.backends.torch.host_calls import call_in_step as call_in_step
from keras_flow.backends.torch.host_calls import dense as dense
from keras_flow.backends.torch.layouts import constrain as constrain
from keras_flow.backends.torch.layouts import engine_layout as engine_layout
from keras_flow.backends.torch.privates import privates as privates
from keras_flow.backends.torch.probes import all_reduce as all_reduce
from keras_flow.backends.torch.probes import devices_seen as devices_seen
from keras_flow.backends.torch.probes import free_memory as free_memory
from keras_flow.backends.torch.processes import delete_text as delete_text
from keras_flow.backends.torch.processes import first_text as first_text
from keras_flow.backends.torch.processes import get_text as get_text
from keras_flow.backends.torch.processes import put_text as put_text
from keras_flow.backends.torch.profiling import annotated as annotated
from keras_flow.backends.torch.profiling import profiled as profiled
from keras_flow.backends.torch.random import random_fractions as random_fractions
from keras_flow.backends.torch.random import random_offsets as random_offsets
from keras_flow.backends.torch.random import random_part as random_part
from keras_flow.backends.torch.random import random_words as random_words
from keras_flow.backends.torch.random import reorder as reorder
from keras_flow.backends.torch.replica import make_replica as make_replica
from keras_flow.backends.torch.saving import write_alone as write_alone
from keras_flow.backends.torch.servers import connect_servers as connect_servers
from keras_flow.backends.torch.servers import serve as serve
from keras_flow.backends.torch.stage_messages import from_process_of as from_process_of
from keras_flow.backends.torch.stage_messages import receive_tensors as receive_tensors
from keras_flow.backends.torch.stage_messages import send_tensors as send_tensors
from keras_flow.backends.torch.stages import add as add
from keras_flow.backends.torch.stages import apply_gradients as apply_gradients
from keras_flow.backends.torch.stages import compiled as compiled
from keras_flow.backends.torch.stages import on as on
from keras_flow.backends.torch.stages import read as read
from keras_flow.backends.torch.stages import stage_program as stage_program
from keras_flow.backends.torch.stages import step_function as step_function
from keras_flow.backends.torch.stages import sum_over_processes as sum_over_processes
from keras_flow.backends.torch.stages import sum_over_ranks as sum_over_ranks
from keras_flow.backends.torch.stages import write as write
from keras_flow.backends.torch.tensors import as_numpy as as_numpy
from keras_flow.backends.torch.tensors import from_engine as from_engine
from keras_flow.backends.torch.tensors import on_rank as on_rank
from keras_flow.backends.torch.tensors import put as put
from keras_flow.backends.torch.tensors import to_engine as to_engine
from keras_flow.backends.torch.tensors import vjp as vjp
from keras_flow.backends.torch.trainer import double_precision as double_precision
from keras_flow.backends.torch.trainer import enter as enter
from keras_flow.backends.torch.trainer import forget_steps as forget_steps
from keras_flow.backends.torch.trainer import recover as recover
from keras_flow.backends.torch.trainer import rejoin as rejoin
from keras_flow.backends.torch.variables import fill as fill
from keras_flow.backends.torch.variables import is_split_over_processes as is_split_over_processes
from keras_flow.backends.torch.variables import place as place
from keras_flow.backends.torch.variables import shards as shards

if TYPE_CHECKING:
    from keras_flow.backends import torch
    from keras_flow.backends.interface import Backend

    _: Backend = torch  # a type checker compares the module with the interface

name = "torch"
