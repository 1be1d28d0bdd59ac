"""Where samples come from and how they become batches."""
