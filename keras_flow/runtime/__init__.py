"""Ranks and processes: start, count, run on all."""
