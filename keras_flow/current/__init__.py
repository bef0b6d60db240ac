"""What an engine may see of a distribution: the active one, layouts of variables, how a batch divides, who creates.

Backends import this package and nothing above it; `keras_flow/distributions` fills it in.
"""
