"""Kernels on tensors, without models, ranks or plans: lookups, updates, ids, matrix products, hashing."""
