"""Parameter servers: who is chief, worker or server, and the steps of a model whose variables are on servers."""
