"""Lists the packages: two folders, `keras_flow/` and `backends/`, make one package. All else is in pyproject.toml."""

from setuptools import find_packages, setup

# keras_flow/backends is a link to backends/, for editors (docs/adr/012): a checkout may have lost it
below = {f"keras_flow.{name}" for name in find_packages("keras_flow")}
backends = {"keras_flow.backends", *(f"keras_flow.backends.{name}" for name in find_packages("backends"))}

setup(packages=sorted({"keras_flow"} | below | backends))
