"""Reports as self-contained HTML pages: runs, predicted and measured; comparisons; plans; clusters."""

from shardwright.report.run_page import render

__all__ = ["render"]
