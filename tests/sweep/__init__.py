"""The sweep: every public name of Keras that computes something, trained under a covering set of meshes, rows and
rules.

`names` finds the names by introspection, `cases` has a piece of a model for each, `design` says under which layouts
each is run, `program` trains a group of pieces, `worker` runs groups in a process that may die, `runner` keeps the
results.
"""
