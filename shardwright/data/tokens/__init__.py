"""Text to packed token files, and sequences of tokens for language models. Nothing here imports torch."""
