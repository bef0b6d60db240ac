"""sbp: how it is written, read and refused."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keras_flow import FlowError, sbp

one_sbp = st.one_of(st.integers(-3, 3).map(sbp.split), st.just(sbp.broadcast), st.just(sbp.partial_sum))


@given(st.lists(one_sbp, min_size=1, max_size=3))
def test_text_is_read_back(parts: list[sbp.Sbp]) -> None:
    nd_sbp = tuple(parts)
    assert sbp.parse(sbp.text(nd_sbp)) == nd_sbp
    assert sbp.parse(f"( {sbp.text(nd_sbp)}, )".replace(",", " , ")) == nd_sbp


@pytest.mark.parametrize("written", ["S(1),B,P", "s(1), b, p", "(S(1),B,P)", "split(1), broadcast, partial_sum"])
def test_spellings(written: str) -> None:
    assert sbp.parse(written) == (sbp.split(1), sbp.broadcast, sbp.partial_sum)


@given(st.lists(one_sbp, min_size=1, max_size=3))
def test_every_form_of_an_nd_sbp_is_the_same(parts: list[sbp.Sbp]) -> None:
    names = tuple("abc"[: len(parts)])
    nd_sbp = tuple(parts)
    assert sbp.nd_sbp(nd_sbp, names) == nd_sbp
    assert sbp.nd_sbp(list(nd_sbp), names) == nd_sbp
    assert sbp.nd_sbp(sbp.text(nd_sbp), names) == nd_sbp
    assert sbp.nd_sbp([repr(part) for part in nd_sbp], names) == nd_sbp
    by_name = {name: part for name, part in zip(names, nd_sbp, strict=True) if part != sbp.broadcast}
    assert sbp.nd_sbp(by_name, names) == nd_sbp, "axes left out are broadcast"
    assert sbp.nd_sbp(dict(reversed(by_name.items())), names) == nd_sbp, "the order of a mapping means nothing"


def test_one_sbp_is_enough_on_one_axis() -> None:
    assert sbp.nd_sbp(sbp.split(0), ("a",)) == (sbp.split(0),)


def test_ints_of_numpy() -> None:
    assert sbp.split(np.int64(1)) == sbp.split(1)


@pytest.mark.parametrize("wrong", ["0", 0.0, True, None])
def test_split_takes_an_int(wrong: object) -> None:
    with pytest.raises(FlowError, match=r"sbp\.split takes a dimension as an int, got .*; for example kf\.sbp\.split"):
        sbp.split(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ("S(0),X", "cannot read 'X' in the nd_sbp 'S(0),X': each part is S(dim), B or P"),
        ("", 'for example "S(0),B"'),
        ("S()", "cannot read 'S()'"),
        ("S1,B", """cannot read 'S1' (did you mean "S(1)"?) in the nd_sbp 'S1,B'"""),
        ({"a": "S1"}, """cannot read the sbp 'S1' (did you mean "S(1)"?): an sbp is S(dim), B or P"""),
        ({"rows": sbp.split(0)}, "no axis 'rows': the placement's axes are ['a', 'b']"),
        (
            (sbp.split(0),),
            "has 1 sbp, the placement has 2 axes ['a', 'b']: give one sbp for each axis, outer axis first",
        ),
        (sbp.broadcast, "has 1 sbp, the placement has 2 axes"),
        ("B,B,B", "has 3 sbp, the placement has 2 axes"),
        ((0, 1), "0 in (0, 1) is not an sbp: use kf.sbp.split(dim), kf.sbp.broadcast or kf.sbp.partial_sum"),
        ({"a": 0}, "is not an sbp"),
        (5, "cannot read an nd_sbp from 5: give a tuple, a string as 'S(0),B' or a dict by axis name"),
    ],
)
def test_mistakes(spec: object, text: str) -> None:
    with pytest.raises(FlowError) as error:
        sbp.nd_sbp(spec, ("a", "b"))  # type: ignore[arg-type]
    assert text in str(error.value)


def test_keras_spelling_of_a_layout_is_translated() -> None:
    with pytest.raises(FlowError, match=r"is Keras's spelling.*; here it is \{.model.: kf\.sbp\.split\(1\)\}"):
        sbp.nd_sbp((None, "model"), ("data", "model"))  # type: ignore[arg-type]
