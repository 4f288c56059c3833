"""Measurements on a GPU; `run_all.sh` runs all of them."""
