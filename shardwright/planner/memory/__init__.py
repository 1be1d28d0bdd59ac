"""Bytes per memory tier of a rank: tables, dense model, activations; and what does not fit."""
