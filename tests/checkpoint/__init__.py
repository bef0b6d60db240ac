"""Tests of `kf.checkpoint` and of `kf.callbacks.Checkpoint`."""
