"""Serving: a trained model as files, a predictor over them, and its HTTP endpoint."""
