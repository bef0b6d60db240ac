"""Data, model and hybrid parallel matrix products, said by placement and SBP.

    KERAS_BACKEND=jax python examples/global_tensors.py        (or tensorflow, torch, numpy)

A matrix product y = x w is data parallel when x is split by rows and w broadcast, model parallel when w is split by
columns, and hybrid when each axis of the placement does one of them. The printed plans say what each costs before
anything runs: what to look at are the signatures and the bytes.
"""

import keras
import numpy as np

import keras_flow as kf


def main() -> None:
    """Print the plans and check the products."""
    show = print if 0 in kf.env.local_ranks() else lambda *_: None
    line = kf.Placement([0, 1, 2, 3], axis_names=("all",))
    mesh = kf.Placement([[0, 1], [2, 3]], axis_names=("data", "model"))
    split, broadcast, partial = kf.sbp.split, kf.sbp.broadcast, kf.sbp.partial_sum

    def tensors(placement: kf.Placement, x_sbp: object, w_sbp: object) -> tuple[kf.GlobalTensor, kf.GlobalTensor]:
        # the values depend on the seed and on nothing else
        return (
            kf.randn(64, 48, placement=placement, sbp=x_sbp, seed=1),
            kf.randn(48, 32, placement=placement, sbp=w_sbp, seed=2),
        )

    products = {
        "data parallel": tensors(line, split(0), broadcast),
        "model parallel, by columns": tensors(line, broadcast, split(1)),
        "model parallel, by rows": tensors(line, split(1), split(0)),
        "hybrid": tensors(mesh, (split(0), broadcast), (broadcast, split(1))),
        "layouts that do not fit: boxed as it costs least": tensors(mesh, (split(1), broadcast), (broadcast, split(1))),
    }
    reference = None
    for name, (x, w) in products.items():
        show(f"\n== {name}")
        show(kf.explain(kf.ops.matmul, x, w))
        y = kf.ops.matmul(x, w)
        value = y.numpy()
        reference = value if reference is None else reference
        assert np.allclose(value, reference, atol=1e-4)
        show(repr(y).splitlines()[0])

    show("\n== boxing: the sum of parts, as blocks")
    x, w = products["model parallel, by rows"]
    parts = kf.ops.matmul(x, w)
    assert parts.sbp == (partial,)
    show(kf.boxing.plan(parts.layout, kf.Layout(line, split(0), parts.shape), parts.dtype).explain())
    assert np.allclose(parts.to_global(sbp=split(0)).numpy(), reference, atol=1e-4)

    if keras.backend.backend() != "numpy":
        show("\n== gradients lie as their inputs do")
        x, w = products["hybrid"]
        value, (dx, dw) = kf.value_and_grad(lambda x, w: kf.ops.mean(kf.ops.square(kf.ops.matmul(x, w))))(x, w)
        show(f"loss {float(value):.4f}; x {x.sbp}, its gradient {dx.sbp}; w {w.sbp}, its gradient {dw.sbp}")


if __name__ == "__main__":
    kf.run(main, devices=4)
