"""Names that may be meant: those that differ in like parts, and no others."""

from __future__ import annotations

import pytest

from keras_flow.near_names import nearest, or_examples

PATHS = [
    "net/encoder/block_0/hidden/kernel",
    "net/encoder/block_0/hidden/bias",
    "net/encoder/block_0/attention/query/kernel",
    "net/logits/kernel",
    "net/embedding/embeddings",
]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (r".*hiden.*kernel$", [PATHS[0]]),
        ("logit/kernel", [PATHS[3]]),
        ("hiden", [PATHS[1], PATHS[0]]),
        (r"atention/(query|key)/kernel", [PATHS[2]]),
        ("model/logits/kernel", [PATHS[3]]),
        (r"encodr/block_\d+/hidden/kernel", [PATHS[0]]),
        ("dense/kernel", []),
        ("net/encoder/block_0/conv/kernel", []),
        ("x", []),
    ],
)
def test_only_what_may_be_meant_is_near(name: str, expected: list[str]) -> None:
    assert nearest(name, PATHS) == expected


def test_the_equal_end_of_a_path_comes_before_a_like_one() -> None:
    assert nearest("net/dense_2/kernel", ["net/dense/kernel", "net/dense_1/kernel", "net/out/kernel"]) == [
        "net/dense_1/kernel",
        "net/dense/kernel",
    ]


def test_an_error_says_that_examples_are_none_but_that() -> None:
    assert or_examples("dense/kernel", PATHS).startswith("no path is like it; there are, for example, 'net/encoder/")
    assert or_examples("hiden", PATHS) == f"the nearest paths are {PATHS[1]!r}, {PATHS[0]!r}"
    assert or_examples("hiden", []) == "there are no paths"
