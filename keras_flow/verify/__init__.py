"""Proof on the user's own model and batch that a distributed step has the numbers of one device."""
