"""A program for which each process must be one rank."""

import keras_flow.hvd as hvd

hvd.init()
