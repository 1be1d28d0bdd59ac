"""Measure what machines cost, and describe what models cost."""
