"""Checkpoints: logical names to rectangles to files; complete or absent."""
