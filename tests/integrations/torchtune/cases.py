"""Cases of torchtune."""

CASES = {}
