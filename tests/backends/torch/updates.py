"""Checks of gradients in flat memory and of Adam's fused kernel: run on four processes, for `test_on_four_ranks`."""

from __future__ import annotations

import numpy as np

from tests.backends.torch.registry import check


@check
def gradients_that_a_program_keeps_stay_what_they_were() -> None:
    """Buckets take their memory again in the next step, unless something of it is still held."""
    import keras
    import torch

    import keras_flow as kf

    held: list[torch.Tensor] = []

    class Keeps(keras.Model):
        def train_step(self, data):
            inputs, targets = data[:2]
            self.zero_grad()
            self.compute_loss(y=targets, y_pred=self(inputs, training=True)).backward()
            variables = self.trainable_variables
            gradients = [variable.value.grad for variable in variables]
            # a part, a whole one, and nothing in the third step
            held.extend([[gradients[0][:1]], [gradients[1]], []][len(copies) % 3])
            copies.append([gradient.clone() for gradient in gradients])
            with torch.no_grad():
                self.optimizer.apply(gradients, variables)
            return {}

    copies: list[list[torch.Tensor]] = []
    x = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")
    with kf.DataParallel().scope():
        inputs = keras.Input((4,))
        model = Keeps(inputs, keras.layers.Dense(2)(inputs))
        model.compile(keras.optimizers.SGD(0.5), "mse")
        for _ in range(6):
            model.train_on_batch(x, np.cos(x[:, :2]))
    assert not torch.equal(copies[0][0], copies[1][0])
    for step, kept in zip((0, 1, 3, 4), held, strict=True):
        wanted = copies[step][0][:1] if step % 3 == 0 else copies[step][1]
        assert torch.equal(kept, wanted), step


@check
def adam_by_the_fused_kernel_is_kerass_formula() -> None:
    """Within rounding, for each of its options; in another dtype, or a layout in memory, by Keras's own operators."""
    import keras
    import torch

    import keras_flow as kf
    from keras_flow.backends.torch import fused_adam

    def trained(optimizer: keras.optimizers.Optimizer, dtype: str) -> list[np.ndarray]:
        random = np.random.default_rng(0)
        variables = [keras.Variable(random.normal(size=shape), dtype=dtype) for shape in ((5, 3), (3,), ())]
        for step in range(5):
            gradients = [
                torch.tensor(random.normal(size=v.shape) * 10.0**-step, dtype=v.value.dtype) for v in variables
            ]
            optimizer.apply(gradients, variables)
        return [keras.ops.convert_to_numpy(variable).astype("float64") for variable in variables]

    kinds = (
        lambda: keras.optimizers.Adam(0.1),
        lambda: keras.optimizers.Adam(0.1, amsgrad=True, beta_1=0.5, epsilon=1e-3),
        lambda: keras.optimizers.AdamW(keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.9), weight_decay=0.1),
        lambda: keras.optimizers.Adam(0.1, clipnorm=0.1, use_ema=True),
    )
    counted: list[bool] = []
    original = fused_adam.update
    fused_adam.update = lambda *args: counted.append(original(*args)) or counted[-1]  # type: ignore[func-returns-value]
    try:
        for make in kinds:
            for dtype, most in (("float32", 3e-7), ("float64", 1e-14)):
                wanted = trained(make(), dtype)
                assert not counted
                with kf.DataParallel().scope():
                    found = trained(make(), dtype)
                assert counted and all(counted), "by the kernel"
                counted.clear()
                for ours, theirs in zip(found, wanted, strict=True):
                    assert np.abs(ours - theirs).max() <= most * max(1.0, np.abs(theirs).max())
        with kf.DataParallel().scope():
            trained(keras.optimizers.Adam(0.1), "bfloat16")
            trained(keras.optimizers.Adamax(0.1), "float32")
        assert not any(counted)
    finally:
        fused_adam.update = original


@check
def a_pipeline_updates_by_the_fused_kernel() -> None:
    """Its steps run without an active distribution, and its weights are plain tensors of one rank."""
    import keras

    import keras_flow as kf
    from keras_flow.backends.torch import fused_adam

    counted: list[bool] = []
    original = fused_adam.update
    fused_adam.update = lambda *args: counted.append(original(*args)) or counted[-1]  # type: ignore[func-returns-value]
    try:
        ranks = kf.Placement(range(4), axis_names=("pipe",))
        with kf.PipelineParallel(ranks, microbatches=4).scope():
            model = keras.Sequential([keras.Input((4,)), *(keras.layers.Dense(4) for _ in range(4))])
            model.compile("adam", "mse")
        model.fit(np.ones((16, 4)), np.ones((16, 4)), batch_size=8, verbose=0)
    finally:
        fused_adam.update = original
    assert counted == [True, True]
