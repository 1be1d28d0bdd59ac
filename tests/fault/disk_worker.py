"""Train with rows on disk, with a checkpoint every few steps; continue from the last one. For test_disk_kills.py.

python -m disk_worker FOLDER
"""

import sys
from pathlib import Path

import torch
from test_tables_on_disk import OPTIMIZERS, batch_of, job_of

STEPS, STEPS_PER_CHECKPOINT = 60, 5


def train(folder: Path, *, disk: bool):
    """The job after all steps."""
    job = job_of(OPTIMIZERS[3], disk=disk)
    found = sorted(folder.glob("step-*"))
    if found:
        job.load(found[-1])
    for step in range(job.step, STEPS, STEPS_PER_CHECKPOINT):
        for _ in job.run([batch_of(seed) for seed in range(step, step + STEPS_PER_CHECKPOINT)]):
            print(job.step, flush=True)
        job.save(folder)
    return job


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.save(train(Path(sys.argv[1]), disk=True).state().tensors, Path(sys.argv[1]) / "final.pt")
