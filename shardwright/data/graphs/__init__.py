"""Graphs of labeled nodes, and sampled neighborhoods as samples."""
