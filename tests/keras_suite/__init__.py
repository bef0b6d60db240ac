"""Keras's own tests, which its wheel ships, run inside the scope of a distribution beside themselves without one."""
