"""Run the stages of a plan: slots, serial and overlapped executors, and a tracer of events."""
