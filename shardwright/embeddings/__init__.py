"""Sharded embedding tables: layout over ranks, exchange of ids and vectors, fused update."""
