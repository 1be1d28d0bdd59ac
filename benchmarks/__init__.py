"""One script per claim; each prints one JSON line per case and may write them to benchmarks/results/.

`python -m benchmarks NAME`, `python -m benchmarks.NAME --help`; see README, "Working on it".
"""
