"""`keras-flow doctor`: what works here. Host checks in this process, each engine in processes of its own."""
