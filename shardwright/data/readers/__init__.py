"""Remote readers: processes on this or another host that read batches, and authenticated connections."""
