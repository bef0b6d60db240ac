"""Global tensors: one logical tensor on the ranks of a placement, and the operators of `keras.ops` on them.

What happens to `x + y`, by module:

1. `operators`: `GlobalTensor.__add__` is `kf.ops.add(x, y)`.
2. `ops`: an `Operator` puts its arguments under the names of its parameters (`keras_operators`).
3. `dispatch.cheapest`: along a split dim, if the operator has a decomposition (`decompositions`) that receives fewer
   bytes in a dry run (`dry_run`), that program of other operators runs in its place; each starts again at 2.
4. `dispatch.run`: shapes and dtypes of the results come from `KerasTensor`s; `keras_flow.signatures` chooses the
   signature that receives the fewest bytes; each input is boxed to it (`global_tensor.change_layout`).
5. `dispatch.compute_on_ranks`: each rank of this process calls the Keras function on its shards, with arguments that
   state logical shapes or places made its own (`per_rank`).
6. `tape`: inside `kf.value_and_grad` the operator's pullbacks are recorded, which `gradients` walks back.

`creation`, `from_local` and `from_engine` make global tensors; `explanation` is `kf.explain`.

>>> import keras_flow as kf
>>> mesh = kf.Placement([0, 1])
>>> x = kf.tensor([[1.0, 2.0], [3.0, 4.0]], placement=mesh, sbp="S(0)")
>>> y = kf.tensor([[1.0], [1.0]], placement=mesh, sbp="B")
>>> (x @ y).sbp
(S(0),)
"""

from keras_flow.tensors import decompositions as _decompositions  # noqa: F401  (registers them)
from keras_flow.tensors import operators as _operators  # noqa: F401  (attaches them to GlobalTensor)
