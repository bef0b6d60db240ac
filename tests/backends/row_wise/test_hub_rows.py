"""KerasHub's layers that are said to act row by row: trained by own rows they have the numbers of one device."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.backends.row_wise.hub_rows import BACKBONES

pytestmark = pytest.mark.timeout(600)


def compared(names: list[str], options: dict[str, str]) -> list[str]:
    """On each rank: the classes of KerasHub's layers in the backbones, which are trained by own rows."""
    import warnings

    import keras

    import keras_flow as kf
    from tests.backends.row_wise import hub_rows

    found: set[str] = set()
    for name in names:
        keras.utils.clear_session()
        one, _ = hub_rows.trained(name, kf.DataParallel(kf.Placement([0])))
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            four, model = hub_rows.trained(name, kf.DataParallel(**options))  # type: ignore[arg-type]
        assert not [str(each.message) for each in said if "consistent view" in str(each.message)], name
        for ours, alone in zip(four, one, strict=True):
            np.testing.assert_allclose(ours, alone, rtol=2e-5, atol=2e-6, err_msg=name)
        classes = {type(layer) for layer in model._flatten_layers() if not isinstance(layer, keras.Model)}
        found |= {cls.__name__ for cls in classes if cls.__module__.startswith("keras_hub.")}
    return sorted(found)


@pytest.mark.parametrize(("engine", "options"), [("torch", {}), ("tensorflow", {"strategy": "mirrored"})])
def test_two_backbones(on_ranks: Callable, engine: str, options: dict[str, str]) -> None:
    on_ranks(engine)(compared, ["Gemma", "GPT2"], options)


@pytest.mark.full
def test_all_backbones_and_nothing_else_is_believed(on_ranks: Callable) -> None:
    from keras_flow.backends.row_wise import row_interaction

    found: set[str] = set()
    for name in BACKBONES:
        found |= set(on_ranks("torch")(compared, [name], {}, timeout=300))
    assert found == set(row_interaction._HUB)


def test_what_is_not_kerashubs_own_is_not_believed() -> None:
    import keras_hub

    from keras_flow.backends.row_wise import row_interaction

    class Own(keras_hub.layers.TransformerEncoder):
        pass

    encoder = keras_hub.layers.TransformerEncoder(8, 2)
    assert row_interaction.of_layer(encoder) is None
    assert row_interaction.of_layer(Own(8, 2)) is not None
    encoder.call = lambda x: x[::-1]
    found = row_interaction.of_layer(encoder)
    assert found is not None and "method 'call'" in found.text
    assert row_interaction.of_layer(keras_hub.layers.TransformerEncoder(8, 2, activation=lambda x: x)) is not None
    assert row_interaction.of_layer(keras_hub.layers.FNetEncoder(8)) is not None
