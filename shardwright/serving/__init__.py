"""Serving: export of a trained model to files, a predictor that scores with them, an HTTP endpoint."""
