"""Stages of a model, cut out of its graph, and the step that runs them by a schedule."""
