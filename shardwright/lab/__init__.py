"""A cluster on one machine: hosts joined by shaped links, and ranks that run in them."""
