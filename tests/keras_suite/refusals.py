"""What keras_flow refuses of Keras's own tests; docs/features.md has the same list."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Refusal:
    """One kind of refusal.

    Attributes:
        engines: the engines that refuse it.
        tests: what tests do, in the words of the page.
        says: a part of the error.
    """

    engines: tuple[str, ...]
    tests: str
    says: str


REFUSALS = (
    Refusal(("jax",), "sparse inputs", "a sparse input of shape"),
    Refusal(("tensorflow",), "sparse inputs", "the batch has a sparse tensor"),
    Refusal(("tensorflow",), "ragged inputs", "the batch has a ragged tensor"),
    Refusal(("tensorflow",), "strings in a batch", "the batch has text"),
    Refusal(("tensorflow",), "`jit_compile=True`", "is compiled with jit_compile=True"),
    Refusal(("torch",), "`jit_compile=True`", "jit_compile=True cannot be used"),
    Refusal(
        ("tensorflow",), "the scope of a `tf.distribute` strategy inside ours", "of tf.distribute is entered inside"
    ),
    Refusal(
        ("tensorflow",),
        "a `tf.function` of the test's own that calls a model or reads a variable",
        "in a tf.function of your own",
    ),
    Refusal(("torch",), "strings given to a model", "torch has no tensors of strings"),
    Refusal(("torch",), "a model that Keras's exporter fails on, too", "Keras's exporter for torch failed"),
    Refusal(
        ("torch",),
        "an error that the test waits for, of what process 0 alone writes: the others say that it failed",
        "which writes the files of all processes, failed",
    ),
    Refusal(
        ("torch",),
        "data that each process draws for itself, without a seed, before the scope",
        "the ranks are fed different batches",
    ),
    Refusal(
        ("torch",),
        "a file that each process looks for under a path of its own: one process writes, and the others fail the test",
        "where rank 1 is in the end of a test",
    ),
)

#: engine -> tests that compare two computations more closely than the engine computes one row alone and among others
#: (torch's convolutions take another algorithm for one row: 6e-6 of 3.2 in a spectrogram, on one device)
ROUNDED = {
    "torch": (
        "TestSpectrogram::test_spectrogram_channels_first",
        "TestSpectrogram::test_spectrogram_channels_broadcasting",
    )
}


def is_rounded(engine: str, test: str) -> bool:
    """Whether a test asks for more digits than one device has where its rows are others."""
    return test.endswith(ROUNDED.get(engine, ()))


def listed(engine: str, error: str) -> Refusal | None:
    """Return the kind that an error of an engine is of, if it is in the list."""
    found = (each for each in REFUSALS if engine in each.engines and each.says in error)
    return next(found, None)


def section() -> str:
    """Return the part of docs/features.md."""
    rows = "".join(f"| {each.tests} | {', '.join(each.engines)} | {each.says} |\n" for each in REFUSALS)
    rounded = ", ".join(f"`{test}` ({engine})" for engine, tests in ROUNDED.items() for test in tests)
    return f"""
## Keras's own tests

`tests/keras_suite` runs the tests of Keras's wheel inside a scope, and those that fail there without one, too. Left
out are those of `applications`, `backend`, `datasets`, `distribution`, `legacy`, `testing` and `tree`, which meet no
distribution. A test that passes without a scope and fails within is a fault, unless it is refused for one of these
reasons:

| tests with | engines | the error has |
|---|---|---|
{rows}
Not counted are tests that ask for more digits than one device keeps when its rows are computed alone: {rounded}.
"""
