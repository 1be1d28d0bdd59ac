"""The dense model over ranks: replication, sharding, activation checkpointing, offload, optimizer."""
