"""What the machines and the models cost, found by looking rather than by guessing."""
