"""The input and output of the planner as values: Cluster, Workload, Plan, Timeline. Frozen dataclasses; no torch."""
