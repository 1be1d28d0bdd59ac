"""Batches read by other processes, on this host or others, and the authenticated connection to them."""
