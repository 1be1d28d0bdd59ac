"""Data: click logs, transforms of their columns, sources of samples, and the loading of batches."""
