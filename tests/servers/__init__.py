"""Parameter servers: roles, counting, and jobs of a chief, workers and servers."""
