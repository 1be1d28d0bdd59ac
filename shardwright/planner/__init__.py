"""Decides who holds what and when it moves: pure functions of a Workload and a Cluster."""
