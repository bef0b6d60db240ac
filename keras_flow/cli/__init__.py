"""The command line `keras-flow`."""
