"""What `dist.explain` and `keras-flow explain` print: memory, communication and repeated work of a training step.

The model is never run: its graph and the layouts of its variables are enough, so no device is needed and no weights.

1. `graph`: the calls of the model's layers, in order, with the shapes of the tensors between them.
2. `layer_costs`: for each call, the layout of its output and the collectives that it needs; matrix products of all
   kinds are in `contraction`. Both add to a `StepCost` (`step_cost`).
3. `explain`: walks the calls, adds losses and the optimizer, estimates the peak of memory, returns an `Explanation`.
4. `warn` and `suggest`: layouts that are legal and slow, and rules that would be faster (`pairs` finds the layers);
   `rules_text` writes them down with the user's own.
5. `text`: the explanation as tables; `folding` makes one row of collectives that are alike.
"""
