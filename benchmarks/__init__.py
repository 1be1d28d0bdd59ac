"""One script per claim; each prints a JSON line per case, with --write also to benchmarks/results/.

How to run them: README, "Working on it".
"""
