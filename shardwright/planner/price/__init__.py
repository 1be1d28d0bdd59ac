"""Seconds and bytes of primitives on a cluster: products, memory, collectives, overheads, and lower bounds."""
