"""What each recipe costs in memory and in loss, over tasks in which precision matters.

`python -m benchmarks.memory_vs_loss` trains every task with every recipe and appends one row per run to a CSV, which
`python -m benchmarks.report` turns into docs/benchmarks.md. `tasks` says what is trained, `recipes` with which
optimizer, `run` makes one run a row, `suite` decides which runs come next.
"""
