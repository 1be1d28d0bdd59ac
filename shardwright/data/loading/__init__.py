"""Data loader: batches prefetched by spawned worker processes."""
