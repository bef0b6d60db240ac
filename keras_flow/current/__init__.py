"""The distribution in use, as backends see it, without importing the package that implements distributions.

- `distribution`: the active distribution, as a base class with the methods that backends call.
- `variable_layout`: the layout of a variable, and how Keras carries it.
- `batch`: how many rows of a batch each data rank gets.
- `models`: the distribution and the variables of a model.
- `creator`: which layer, metric or optimizer creates a variable.
- `dry_run`, `recorded_calls`: what `dist.explain` sets while it describes a model.

Backends import this package and nothing above it; `keras_flow/distributions` implements it.
"""
