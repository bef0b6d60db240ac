"""`python -m keras_flow.launch` is `keras-flow launch`."""

import sys

from keras_flow.cli.app import main

sys.argv[1:1] = ["launch"]
main()
