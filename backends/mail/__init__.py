"""Tensors from process to process beside the engine's collectives: pipelines of JAX and TensorFlow, servers of torch.

calls            asks another process and waits for its answer, for parameter servers
frames           writes structures of tensors to connections
letters          carries structures of tensors over connections of our own
stage_messages   sends, receives and adds up what stages tell each other; torch has its own file of this name
structures       describes structures of tensors as JSON
"""
