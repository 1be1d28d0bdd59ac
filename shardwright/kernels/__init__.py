"""Arithmetic of lookups and updates on tensors; knows no models, ranks or plans."""
