"""Names of other systems, each in a package of its own: `keras_flow.compat.oneflow`."""
