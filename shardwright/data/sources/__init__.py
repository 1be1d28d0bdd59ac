"""Samples by index: click logs, growing directories, synthetic clicks; and the order in which they form batches."""
