"""Arguments of other training engines for a split of a model of layers, and splits from a user's arguments."""
