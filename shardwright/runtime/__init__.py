"""From a plan to a running step: build, the stages and who executes them, the loop, metrics and traces."""
