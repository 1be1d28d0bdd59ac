"""The processes of a run: launch, supervise and stop its ranks."""
