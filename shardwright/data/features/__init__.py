"""Transforms of raw columns to ids and normalized numbers, and the statistics they are fitted on."""
