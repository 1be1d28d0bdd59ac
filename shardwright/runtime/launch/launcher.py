"""Launch one process per rank on this host, or join ranks that torchrun, slurm or the lab has started.

The launcher serves the ranks' rendezvous store on loopback. It starts them with torchrun's environment variables, and
restarts them from the last checkpoint when one dies (runtime/launch/supervisor.py).
"""

import ctypes
import os
import re
import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import mkdtemp
from uuid import uuid4

from shardwright.comm.mesh import world_size
from shardwright.errors import UserError

SLURM_PORT = 20_000  # the first of the ports that jobs choose from, by their number
LAUNCHER_PID = "SHARDWRIGHT_LAUNCHER"  # environment variable with the process id of the launcher
PR_SET_PDEATHSIG = 1


def join_launch() -> bool:
    """Whether a launcher (torchrun, slurm, the lab) has started this process as one of several."""
    tasks = int(os.environ.get("SLURM_NTASKS", "1"))
    if "RANK" not in os.environ and tasks > 1 and "SLURM_STEP_ID" in os.environ:
        os.environ.update(_from_slurm(os.environ))
    return world_size() > 1


def check_num_ranks(num_ranks: int) -> None:
    """Whether as many were started as were asked for; 1: whatever was started."""
    if num_ranks not in (1, world_size()):
        raise UserError(
            f"ranks={num_ranks}, but {world_size()} processes were started; leave out ranks=, or start as many"
        )


def launch_id() -> str:
    """Of the launch that this process is of, the same however often its ranks were started; empty: nobody knows."""
    found = os.environ.get("TORCHELASTIC_RUN_ID", "")
    return "" if found == "none" else found


def omp_num_threads() -> str:
    """OMP_NUM_THREADS as set by the user or a launcher; empty if it is not set."""
    return os.environ.get("OMP_NUM_THREADS", "")


def is_restart(previous_launch: str) -> bool:
    """Whether the ranks were started before: by this launch, or, `before` being its name, with other ranks."""
    return (
        int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
        or previous_launch != ""
        and previous_launch == launch_id()
    )


def die_with_launcher() -> None:
    """Make the kernel kill this rank when its launcher dies for any reason.

    The kernel sends the signal when the thread that started this process ends: launchers start ranks from their main
    thread. If the launcher died before this call there is no signal, but this process then has another parent.
    """
    ours = os.environ.get(LAUNCHER_PID)
    if ours is None and "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if ours is not None and os.getppid() != int(ours):
        os.kill(os.getpid(), signal.SIGKILL)


def launch_ranks(num_ranks: int, command: Sequence[str], max_restarts: int = 0) -> int:
    """Run the command as `ranks` processes on this host; restart all of them up to `restarts` times when one dies.

    Returns the exit status of the first rank that failed, else 0. Call it from the main thread."""
    from shardwright.comm import store
    from shardwright.runtime.launch.supervisor import Supervisor

    job_store = store.serve()
    run = f"shardwright-{uuid4().hex}"
    logs = Path(mkdtemp(prefix="shardwright-logs-"))
    with Supervisor(logs) as supervisor:
        for attempt in range(max_restarts + 1):
            variables = {"TORCHELASTIC_RUN_ID": run, "TORCHELASTIC_RESTART_COUNT": str(attempt)}
            environments = [_environment(rank, num_ranks, job_store.port) | variables for rank in range(num_ranks)]
            ended = supervisor.run([sys.executable, *command], environments)
            if ended.failed_rank is None:
                shutil.rmtree(logs, ignore_errors=True)
                return ended.code
            more = attempt < max_restarts and not supervisor.signal
            where = store.last_heartbeat(store.open_attempt(job_store, attempt, num_ranks), ended.failed_rank)
            remedy = f"all ranks start again from the last checkpoint (restart {attempt + 1} of {max_restarts})"
            if not more:
                name = next((word for word in command if word.startswith("run.name=")), "run.name=NAME")
                remedy = f"continue from the last checkpoint with {name} run.resume=true"
            if ended.is_silent or more:
                place = f"in {where}" if where else "before its first step"
                print(
                    f"shardwright: {ended.description} {place}; its log: "
                    f"{supervisor.log_path(ended.failed_rank)}; {remedy}",
                    file=sys.stderr,
                    flush=True,
                )
            if not more:
                return ended.code
    raise AssertionError


def _environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    """The environment of a rank, with torchrun's variables. Gloo listens on loopback only, whatever GLOO_SOCKET_IFNAME
    is set to; a rank that crashes writes its traceback to its log."""
    from shardwright.comm import store

    return {
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(ranks),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": store.LOOPBACK,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "GLOO_SOCKET_IFNAME": store.LOOPBACK_INTERFACE,
        "PYTHONFAULTHANDLER": "1",
        LAUNCHER_PID: str(os.getpid()),
    }


def _from_slurm(found: "os._Environ[str]") -> dict[str, str]:
    """What torchrun would have told."""
    first = re.match(r"([^\[,]+)(?:\[(\d+))?", found.get("SLURM_STEP_NODELIST", ""))
    if not first:
        raise UserError("slurm started several tasks without SLURM_STEP_NODELIST; set RANK and MASTER_ADDR as torchrun")
    name = first[1] + (first[2] or "")
    nodes = int(found.get("SLURM_STEP_NUM_NODES", found.get("SLURM_NNODES", "1")))
    on_each = str(-(-int(found["SLURM_NTASKS"]) // nodes))  # where --ntasks-per-node was not given
    return {
        "RANK": found["SLURM_PROCID"],
        "WORLD_SIZE": found["SLURM_NTASKS"],
        "LOCAL_RANK": found.get("SLURM_LOCALID", "0"),
        "LOCAL_WORLD_SIZE": found.get("SLURM_NTASKS_PER_NODE", on_each),
        "MASTER_ADDR": found.get("MASTER_ADDR", name),
        "MASTER_PORT": found.get("MASTER_PORT", str(SLURM_PORT + int(found.get("SLURM_JOB_ID", "0")) % 10_000)),
    }
