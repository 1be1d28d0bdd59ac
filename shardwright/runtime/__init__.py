"""From a plan to training: build a job, its stage functions and state; user training loops, runs and their launch."""
