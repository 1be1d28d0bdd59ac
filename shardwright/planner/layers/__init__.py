"""Plans of models of layers from their sizes alone: memory, time, search."""
