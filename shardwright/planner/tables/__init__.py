"""Tables: what each costs its ranks, the ways to shard it, row or vector exchange, balance and placement."""
