"""Adapters to other packages, each imported only by those who use it."""
