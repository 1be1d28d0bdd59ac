"""Tensors in, tensors out: the arithmetic of lookups and updates, without models, ranks or plans."""
