"""Run a list of stages: slots, the serial and the overlapped executor, and the tracer that records what ran."""
