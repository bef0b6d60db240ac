"""Lists the packages: two folders, `keras_flow/` and `backends/`, make one package. All else is in pyproject.toml."""

from setuptools import find_packages, setup

setup(
    packages=[
        "keras_flow",
        *(f"keras_flow.{name}" for name in find_packages("keras_flow")),
        "keras_flow.backends",
        *(f"keras_flow.backends.{name}" for name in find_packages("backends")),
    ]
)
