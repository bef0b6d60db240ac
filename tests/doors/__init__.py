"""What people do with a model before, beside and after training gives one device's numbers, or is refused in one line.

`names` finds the doors in Keras's public classes and modules, `cases` has a case or a reason for each, `stage` the
settings in which they are opened, `run` opens them on an engine's ranks and compares.
"""
