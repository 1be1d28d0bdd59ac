"""One script per claim; each prints one JSON line per case and may write them to benchmarks/results/.

README, "Working on it", says how they are run.
"""
