"""One script per claim; each prints one JSON line per case and may write them to benchmarks/results/.

How to run them: README, "Working on it".
"""
