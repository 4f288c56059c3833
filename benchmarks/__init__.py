"""One script per question; results are committed CSV."""
