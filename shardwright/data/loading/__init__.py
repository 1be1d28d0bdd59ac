"""Batches read ahead by spawned worker processes."""
