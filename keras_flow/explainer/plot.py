"""`kf.plot_layout`: a model as a picture, with the layouts of its variables and tensors and what is sent."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from keras_flow.explainer import tables
from keras_flow.explainer.explanation import Explanation
from keras_flow.explainer.graph import outer_of
from keras_flow.pictures.drawing import Drawing
from keras_flow.pictures.graph import Edge, Node, graph
from keras_flow.units import amount

if TYPE_CHECKING:
    import keras

    from keras_flow.distributions.distribution import FlowDistribution


def plot_layout(
    model: keras.Model, distribution: FlowDistribution, batch_size: int = 32, to_file: str | Path | None = None
) -> Drawing:
    """Draw a model's graph with layouts on its edges and its collectives beside the layers that cause them.

    Args:
        model: a built model.
        distribution: what lays it.
        batch_size: rows of a global batch.
        to_file: a file that ends with `.svg` or `.png`; None writes none.

    Returns:
        The picture, which a notebook shows; `save(path)` writes it.

    Raises:
        FlowError: the model is not built, or the file cannot be written.

    Example:
        >>> import keras, keras_flow as kf
        >>> ranks = kf.init(4)
        >>> mesh = kf.Placement([[0, 1], [2, 3]], axis_names=("data", "model"))
        >>> dist = kf.ModelParallel(mesh, rules={"kernel": {"model": kf.sbp.split(1)}})
        >>> with dist.scope():
        ...     model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4, name="out")], name="small")
        >>> picture = kf.plot_layout(model, dist, batch_size=16)
        >>> "kernel: B,S(1)" in picture.svg
        True
    """
    drawing = draw(distribution.explain(model, batch_size))
    if to_file is not None:
        drawing.save(to_file)
    return drawing


def draw(explanation: Explanation) -> Drawing:
    """The picture of an explanation."""
    paths = {call.path for call in explanation.calls}
    sends: dict[str, list[str]] = {}
    for sent in explanation.collectives:
        words = f"{sent.phase}: {sent.kind} over {', '.join(sent.axes)}, {amount(sent.received)} ({sent.tensor})"
        # joined gradients name several layers, and are drawn at the last
        path = sent.path.rpartition(", ")[2]
        sends.setdefault(outer_of(path, paths) or path, []).append(words)
    layouts: dict[str, list[tuple[str, str]]] = {}
    for row in explanation.variables:
        path = row.path.rpartition("/")[0]
        layer = outer_of(path, paths) or path
        layouts.setdefault(layer, []).append((row.path[len(layer) :].lstrip("/"), row.layout))
    nodes = [
        Node(call.path, call.kind, layouts.get(call.path, []), call.inputs, call.outputs, sends.pop(call.path, []))
        for call in explanation.calls
    ]
    if rest := [words for texts in sends.values() for words in texts]:
        outputs = nodes[-1].outputs if nodes else ()
        nodes.append(Node("loss and metrics", explanation.model, [], outputs, (), rest))
    tensors = {
        key: Edge(f"{list(tensor.shape)} {tensor.layout}", "S(" in tensor.layout)
        for key, tensor in explanation.tensors.items()
    }
    axes = ", ".join(f"{name}={ranks}" for name, ranks in explanation.placement.items())
    title = (
        f"{explanation.model} on {axes} ({explanation.engine}), batches of {explanation.batch_size} rows: "
        f"{tables.received(explanation)}"
    )
    return Drawing(graph(title, explanation.inputs, nodes, tensors), str(explanation))
