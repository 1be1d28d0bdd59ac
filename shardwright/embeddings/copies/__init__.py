"""Copies of table rows that may miss recent updates of other ranks (bounded staleness)."""
