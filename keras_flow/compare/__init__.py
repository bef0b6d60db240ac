"""Comparison runs: one program on several backends and layouts, from the same weights and the same order of samples."""
