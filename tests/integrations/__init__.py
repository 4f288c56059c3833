"""The library inside the trainers that people use, each in an environment of its own: see `run`."""
