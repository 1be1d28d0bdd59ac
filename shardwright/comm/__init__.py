"""The only place that issues collectives or makes streams."""
