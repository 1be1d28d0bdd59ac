"""Dense parts over ranks."""
