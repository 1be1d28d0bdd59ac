"""The report: one HTML page that shows a run, predicted and measured, without a network."""

from shardwright.report.run_page import render

__all__ = ["render"]
