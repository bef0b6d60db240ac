"""`strategy="mirrored"`: TensorFlow's own MirroredStrategy and MultiWorkerMirroredStrategy under a distribution.

strategy       the engine's strategy for a distribution, and its variables
step           a step of the replicas
replica_math   sums over replicas in what Keras computes for each
"""
