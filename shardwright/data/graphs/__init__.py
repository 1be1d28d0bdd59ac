"""Graphs of labelled nodes, and sampled neighbourhoods as samples."""
