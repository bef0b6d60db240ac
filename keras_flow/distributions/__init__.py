"""Distributions: from rules to the layouts of a model's variables."""
