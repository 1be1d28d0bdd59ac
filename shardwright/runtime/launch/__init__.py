"""The processes of a run: launching, supervising and stopping ranks, and the cores each gets."""
