"""Pipelines: stages, their numbers, and what is refused."""
