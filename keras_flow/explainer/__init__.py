"""`dist.explain`, `keras-flow explain`: what a layout holds, sends and repeats. No device, no weights, no compiler.

Data flows one way: `graph` (calls of a model) -> `rules` (how each call lays its output, what it sends) ->
`explanation` (values) -> `text`, JSON, `warn`, `suggest`.
"""
