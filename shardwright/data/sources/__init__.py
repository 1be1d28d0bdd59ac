"""Samples by index: click logs, growing directories, synthetic clicks; and the sample order of batches."""
