"""A worker or server that `keras-flow launch --servers` starts: it serves until the chief has ended."""

from __future__ import annotations

from keras_flow.current.joining import joining_seconds
from keras_flow.errors import FlowError
from keras_flow.launch import roles

if __name__ == "__main__":
    role = roles.find()
    if role is None or role.job == "chief":
        raise FlowError('python -m keras_flow.servers serves as a "worker" or "ps" of TF_CONFIG, and it names none')
    roles.serve(role, joining_seconds())
