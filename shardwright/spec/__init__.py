"""The nouns everything else speaks: Cluster, Workload, Plan, Timeline. Frozen values, no torch, no numpy."""
