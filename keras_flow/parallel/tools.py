"""The methods `explain` and `verify` of every distribution."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from keras_flow.distributions.distribution import FlowDistribution

if TYPE_CHECKING:
    import keras

    from keras_flow.explainer.explanation import Explanation
    from keras_flow.verify.verification import Verification


class ExplainedDistribution(FlowDistribution):
    """A distribution with `explain` and `verify`. Both take seconds to load, so they are imported when called."""

    def explain(self, model: keras.Model, batch_size: int) -> Explanation:
        """Layouts, memory and communication of a training step, without running anything.

        Args:
            model: a built model, created inside or outside of a scope.
            batch_size: rows of a global batch.

        Returns:
            Layouts and bytes of each variable, memory of each rank, every collective with its bytes and cause,
            warnings; printed as tables.

        Raises:
            FlowError: the model is not built, or `batch_size` is no number of rows.
            LayoutError: rules are wrong, or match nothing; as `check` says it.
        """
        from keras_flow.explainer.explain import explain

        explanation = explain(self, model, batch_size)
        self.check(model)  # the rules are known to match once the layouts have been asked for
        return explanation

    def verify(
        self,
        model: keras.Model,
        x: object,
        y: object,
        sample_weight: object = None,
        *,
        tolerance: float | None = None,
        dtype: str | None = None,
        by_layer: bool | None = None,
    ) -> Verification:
        """Prove on a model and a batch of yours that a step under this distribution has the numbers of one device.

        The step runs under the distribution and on one device of the same engine, from the same weights and random
        state, on rows that divide by the data ranks (in a pipeline by the micro-batches) and on rows that do not.
        Compared are outputs, loss, metrics, and of every variable the gradient and one plain SGD update, in training,
        evaluation and inference. Afterwards the model, its optimizer and the random states are as before; compiled
        steps are dropped.

        Where one device cannot hold the model, each layer is verified by itself: from the input recorded for it under
        the distribution, with random numbers as the gradient of its outputs. One device then holds the weights of one
        layer at a time.

        On torch all ranks call it. On JAX and TensorFlow one process must drive all ranks.

        Args:
            model: a built and compiled model. One with a `train_step` of its own is verified as it is.
            x, y, sample_weight: one batch, as `train_on_batch` takes it: arrays, or structures of arrays, [rows, ...].
            tolerance: of gradients and updates, relative to the largest element of the variable; outputs, losses and
                metrics have a tenth of it. None takes 1e-4, in double precision 1e-5, in half precision 16 units of
                rounding.
            dtype: `"float64"` verifies a copy of the model that computes in double precision on both sides, for where
                rounding and a small mistake look alike. (Even then Keras 3.15 computes BatchNormalization, and on torch
                every matrix product, in single precision.) None verifies the model as it is.
            by_layer: whether each layer is verified by itself; None decides by the free memory of one device. A
                pipeline is verified as a whole.

        Returns:
            A table, worst deviations first: `.ok`, `.to_dict()`, `.raise_if_wrong()`.

        Raises:
            FlowError: the model is not built or compiled, the batch does not fit it, it has randomness of its own, it
                cannot be copied in `dtype`, or several processes drive the ranks on JAX or TensorFlow.
        """
        from keras_flow.verify.run import verify

        return verify(self, model, x, y, sample_weight, tolerance=tolerance, dtype=dtype, by_layer=by_layer)

    def verified(
        self, model: keras.Model, fit: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]]:
        """The arguments of `fit`, after their first batch was verified if the user asked for that (`verify=`)."""
        if self._verified is None or model in self._verified:
            return args, kwargs
        from keras_flow.verify.first_batch import verified

        args, kwargs = verified(self, model, fit, args, kwargs)
        # only the first `fit`: a later one trains the same step
        self._verified.add(model)
        return args, kwargs
