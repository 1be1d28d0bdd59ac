"""One process for every rank: started here with torchrun's own launcher, or joined where one has started them."""

import os
import re
import sys
from collections.abc import Sequence
from uuid import uuid4

from shardwright.comm.mesh import world_size
from shardwright.errors import UserError

SLURM_PORT = 20_000  # the first of the ports that jobs choose from, by their number


def joins() -> bool:
    """Whether a launcher (torchrun, slurm, the lab) has started this process as one of several."""
    tasks = int(os.environ.get("SLURM_NTASKS", "1"))
    if "RANK" not in os.environ and tasks > 1 and "SLURM_STEP_ID" in os.environ:
        os.environ.update(_from_slurm(os.environ))
    return world_size() > 1


def check(ranks: int) -> None:
    """Whether as many were started as were asked for; 1: whatever was started."""
    if ranks not in (1, world_size()):
        raise UserError(f"ranks={ranks}, but {world_size()} processes were started; leave out ranks=, or start as many")


def name() -> str:
    """Of the launch that this process is of, the same however often its ranks were started; empty: nobody knows."""
    found = os.environ.get("TORCHELASTIC_RUN_ID", "")
    return "" if found == "none" else found


def asked_threads() -> str:
    """The user's, or a launcher's, OMP_NUM_THREADS; empty where nobody set it."""
    return os.environ.get("OMP_NUM_THREADS", "")


def again(before: str) -> bool:
    """Whether the ranks were started before: by this launch, or, `before` being its name, with other ranks."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0 or before != "" and before == name()


def start(ranks: int, command: Sequence[str], restarts: int = 0) -> int:
    """Run the command as so many ranks on this machine, again when one dies, up to so often; the exit status of the
    first that failed, else 0."""
    import logging

    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # ranks tell their errors themselves
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=f"shardwright-{uuid4().hex}",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=restarts,
        monitor_interval=0.2,
    )
    try:
        elastic_launch(config, sys.executable)(*command)
    except SignalException as error:
        return 128 + error.sigval
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    return 0


def _from_slurm(found: "os._Environ[str]") -> dict[str, str]:
    """What torchrun would have told."""
    first = re.match(r"([^\[,]+)(?:\[(\d+))?", found.get("SLURM_STEP_NODELIST", ""))
    if not first:
        raise UserError("slurm started several tasks without SLURM_STEP_NODELIST; set RANK and MASTER_ADDR as torchrun")
    name = first[1] + (first[2] or "")
    return {
        "RANK": found["SLURM_PROCID"],
        "WORLD_SIZE": found["SLURM_NTASKS"],
        "LOCAL_RANK": found.get("SLURM_LOCALID", "0"),
        "LOCAL_WORLD_SIZE": found.get("SLURM_NTASKS_PER_NODE", found["SLURM_NTASKS"]),
        "MASTER_ADDR": found.get("MASTER_ADDR", name),
        "MASTER_PORT": found.get("MASTER_PORT", str(SLURM_PORT + int(found.get("SLURM_JOB_ID", "0")) % 10_000)),
    }
