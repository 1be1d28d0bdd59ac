"""The values of the specification: Cluster, Workload, Plan, Timeline. Frozen dataclasses; no torch."""
