"""Cases of lightning."""

CASES = {}
