"""Which stage computes which call of a model: as patterns or placements say, or cut by cost.

A cut is a place in the list of calls. With costs 3, 1, 1, 3 two stages are cut after the second call: 4 and 4. Of cuts
that are as good, the one is taken at which fewest bytes cross.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence

import keras

from keras_flow.errors import FlowError
from keras_flow.layout import itemsize
from keras_flow.pipelines.graph import Call, CallGraph

#: the length that is assumed where a shape does not say it
_UNKNOWN = 128


def by_cost(graph: CallGraph, stages: int) -> list[int]:
    """Return the stage of each call: the slowest stage is as fast as it can be, and the fewest bytes cross.

    Args:
        graph: the calls.
        stages: how many are wanted.

    Raises:
        FlowError: there are fewer layers with weights than stages.
    """
    costs = [operations(graph, call) for call in graph.calls]
    weighted = sum(bool(_weights(call)) for call in graph.calls)
    if weighted < stages:
        raise FlowError(
            f"{stages} stages of a model with {weighted} layer{'' if weighted == 1 else 's'} that "
            f"{'has' if weighted == 1 else 'have'} weights: a stage has one at least. Ask for fewer stages"
        )
    crossing = [_crossing_bytes(graph, place) for place in range(len(costs) + 1)]
    has_weights = list(itertools.accumulate((bool(_weights(call)) for call in graph.calls), initial=0))
    before = list(itertools.accumulate(costs, initial=0.0))
    # best[place]: (slowest stage, bytes over the cuts, the cuts) of the calls before `place` in so many stages
    best: list[tuple[float, float, tuple[int, ...]] | None] = [None] * (len(costs) + 1)
    best[0] = (0.0, 0.0, ())
    for _ in range(stages):
        following: list[tuple[float, float, tuple[int, ...]] | None] = [None] * (len(costs) + 1)
        for end in range(1, len(costs) + 1):
            choices = [
                (max(found[0], before[end] - before[start]), found[1] + crossing[start], (*found[2], start))
                for start, found in enumerate(best[:end])
                if found is not None and has_weights[end] > has_weights[start]
            ]
            following[end] = min(choices, default=None)
        best = following
    found = best[len(costs)]
    assert found is not None
    starts = found[2]
    return [sum(place >= start for start in starts) - 1 for place in range(len(costs))]


def by_patterns(graph: CallGraph, patterns: Sequence[Sequence[str]]) -> list[int]:
    """Return the stage of each call: the first list with a pattern that is found in the layer's path.

    What no pattern names follows its inputs.

    Args:
        graph: the calls.
        patterns: regular expressions of layer paths, for each stage.

    Raises:
        FlowError: a pattern is found in no path.
    """
    paths = [call.path for call in graph.calls]
    for stage, expressions in enumerate(patterns):
        for expression in expressions:
            if not any(re.search(expression, path) for path in paths):
                raise FlowError(
                    f"stages: {expression!r} of stage {stage} matches no layer; there are {', '.join(paths[:20])}"
                )
    return following_inputs(graph, {number: stage_of_path(path, patterns) for number, path in enumerate(paths)})


def by_ranks(graph: CallGraph, said: Mapping[int, tuple[int, ...] | None]) -> tuple[list[int], list[tuple[int, ...]]]:
    """Return the stage of each call, and the ranks of each stage: where they change, a new stage begins.

    Args:
        graph: the calls.
        said: the ranks of a call, by its number; None where nothing is said: it follows its inputs.
    """
    ranks: list[tuple[int, ...]] = []
    stages: dict[int, int | None] = {}
    for number in range(len(graph.calls)):
        here = said.get(number)
        if here is not None and (not ranks or ranks[-1] != here):
            ranks.append(here)
        stages[number] = None if here is None else len(ranks) - 1
    return following_inputs(graph, stages), ranks


def stage_of_path(path: str, patterns: Sequence[Sequence[str]]) -> int | None:
    """The first stage that has a pattern which is found in a layer's path, or None."""
    for stage, expressions in enumerate(patterns):
        if any(re.search(expression, path) for expression in expressions):
            return stage
    return None


def following_inputs(graph: CallGraph, said: Mapping[int, int | None]) -> list[int]:
    """The stage of each call: what is said, otherwise the latest stage of its inputs."""
    made_in: dict[int, int] = {}
    stages: list[int] = []
    for number, call in enumerate(graph.calls):
        of_inputs = max((made_in[key] for key in call.inputs if key in made_in), default=0)
        stage = said.get(number)
        stages.append(of_inputs if stage is None else stage)
        made_in.update((key, stages[-1]) for key in call.outputs)
    return stages


def check(graph: CallGraph, stages: Sequence[int], count: int) -> None:
    """Refuse stages without layers, and calls that read what a later stage makes.

    Raises:
        FlowError: naming the layer and both stages.
    """
    empty = sorted(set(range(count)) - set(stages))
    if empty:
        raise FlowError(f"stages {empty} have no layers: ask for fewer stages, or name layers for them")
    maker = {key: number for number, call in enumerate(graph.calls) for key in call.outputs}
    for call, stage in zip(graph.calls, stages, strict=True):
        for key in call.inputs:
            number = maker.get(key)
            if number is not None and stages[number] > stage:
                raise FlowError(
                    f"layer {call.path!r} of stage {stage} reads what {graph.calls[number].path!r} of the later stage "
                    f"{stages[number]} makes; a pipeline computes its stages one after the other"
                )


def bytes_of(tensor: keras.KerasTensor) -> int:
    """Bytes of a tensor for one row."""
    return _elements(tensor) * itemsize(keras.backend.standardize_dtype(tensor.dtype))


def _elements(tensor: keras.KerasTensor) -> int:
    """Elements of a tensor for one row."""
    return _product(tensor.shape[1:])


def _crossing_bytes(graph: CallGraph, place: int) -> float:
    """Bytes of a row that cross a cut before the call at `place`."""
    made = {key for call in graph.calls[:place] for key in call.outputs}
    needed = {key for call in graph.calls[place:] for key in call.inputs} | set(graph.output_keys)
    return float(sum(bytes_of(graph.tensors[key]) for key in made & needed))


def _weights(call: Call) -> list[keras.Variable]:
    return list(call.operation.weights) if isinstance(call.operation, keras.Layer) else []


def operations(graph: CallGraph, call: Call) -> float:
    """Multiplications of a call for one row, at least one for each element that it makes.

    Of a weight each element is used once for each place of the output: 64 kernels of 3x3x3 for an image of 8x8 places
    make 64 * 27 * 64. An embedding reads its rows. A recurrent layer uses its weights once for each step, whether it
    returns all steps or the last, and attention multiplies each place with each other.
    """
    layer, elements = call.operation, sum(_elements(graph.tensors[key]) for key in call.outputs)
    if isinstance(layer, keras.layers.Embedding):
        return elements
    shape = graph.tensors[call.outputs[0]].shape if call.outputs else ()
    is_first = getattr(layer, "data_format", None) == "channels_first"
    places = _product(shape[2:] if is_first else shape[1:-1])
    longest = max((_product(graph.tensors[key].shape[1:2]) for key in call.inputs), default=1)
    steps = getattr(layer, "forward_layer", layer)  # of a Bidirectional
    if isinstance(steps, keras.layers.RNN) and not steps.return_sequences:
        places *= longest
    used = sum(math.prod(weight.shape) for weight in _weights(call) if len(weight.shape) > 1)
    inner = layer._flatten_layers() if isinstance(layer, keras.Layer) else ()
    return elements + places * (used + 2 * longest * sum(map(_heads, inner)))


def _heads(layer: keras.Layer) -> int:
    """The length of the queries of one place, of all heads of a layer of Keras's attention."""
    if isinstance(layer, keras.layers.GroupQueryAttention):
        return layer.num_query_heads * layer.head_dim
    return layer.num_heads * layer.key_dim if isinstance(layer, keras.layers.MultiHeadAttention) else 0


def _product(lengths: Sequence[int | None]) -> int:
    return math.prod(_UNKNOWN if length is None else length for length in lengths)
