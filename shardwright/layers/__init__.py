"""Single-device layers: they define the results that distributed execution must reproduce."""
