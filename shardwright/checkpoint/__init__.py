"""Checkpoints: tensors by logical name, stored as rectangles in files; complete or absent."""
