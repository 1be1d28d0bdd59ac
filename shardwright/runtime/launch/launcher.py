"""Launch one process per rank on this host, or join ranks started by torchrun, slurm or the lab.

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

SLURM_PORT = 20_000  # first rendezvous port; a job uses SLURM_PORT + its job id modulo 10,000
LAUNCHER_PID = "SHARDWRIGHT_LAUNCHER"  # environment variable with the process id of the launcher
PR_SET_PDEATHSIG = 1


def join_launch() -> bool:
    """Whether a launcher (torchrun, slurm, the lab) started this process as one of several ranks.

    Under slurm, sets the environment variables that torchrun would have set.
    """
    tasks = int(os.environ.get("SLURM_NTASKS", "1"))
    if "RANK" not in os.environ and tasks > 1 and "SLURM_STEP_ID" in os.environ:
        os.environ.update(_slurm_environment(os.environ))
    return world_size() > 1


def check_num_ranks(num_ranks: int) -> None:
    """Raise a UserError if `num_ranks` is not the number of started processes; 1 allows any number."""
    if num_ranks not in (1, world_size()):
        raise UserError(
            f"ranks={num_ranks}, but {world_size()} processes were started; leave out ranks= or start {num_ranks}"
        )


def launch_id() -> str:
    """Id of the launch that started this process, the same after restarts; empty if unknown."""
    run_id = os.environ.get("TORCHELASTIC_RUN_ID", "")
    return "" if run_id == "none" else run_id


def omp_num_threads() -> str:
    """OMP_NUM_THREADS as set by the user or a launcher; empty if it is not set."""
    return os.environ.get("OMP_NUM_THREADS", "")


def is_restart(previous_launch: str) -> bool:
    """Whether this launch has started its ranks before.

    `previous_launch` is the id of the launch that created the run; a launch may restart with another number of ranks.
    """
    return (
        int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
        or previous_launch != ""
        and previous_launch == launch_id()
    )


def die_with_launcher() -> None:
    """Make the kernel kill this rank when its launcher dies for any reason.

    The kernel sends SIGKILL when the thread that started this process ends; launchers start ranks from their main
    thread. If the launcher died before this call no signal comes, but this process then has another parent.
    """
    launcher_pid = os.environ.get(LAUNCHER_PID)
    if launcher_pid is None and "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    die_with_parent(int(launcher_pid) if launcher_pid is not None else os.getppid())


def is_started_by_launcher() -> bool:
    """Whether `launch_ranks` has started this process."""
    return LAUNCHER_PID in os.environ


def die_with_parent(pid: int) -> None:
    """Make the kernel kill this process when the thread of process `pid` that started it ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != pid:
        os.kill(os.getpid(), signal.SIGKILL)


def launch_ranks(num_ranks: int, command: Sequence[str], max_restarts: int = 0, *, remedy: str = "") -> int:
    """Run the command as `num_ranks` processes on this host; when one dies, restart all.

    Restarts at most `max_restarts` times. `remedy`: what to do after a failure; empty: resume the run. Returns the exit
    status of the first rank that failed, else 0. Call it from the main thread.
    """
    from shardwright.comm import store
    from shardwright.runtime.launch.supervisor import Supervisor

    job_store = store.serve()
    run_id = f"shardwright-{uuid4().hex}"
    logs = Path(mkdtemp(prefix="shardwright-logs-"))
    with Supervisor(logs) as supervisor:
        for attempt in range(max_restarts + 1):
            variables = {"TORCHELASTIC_RUN_ID": run_id, "TORCHELASTIC_RESTART_COUNT": str(attempt)}
            environments = [_rank_environment(i, num_ranks, job_store.port) | variables for i in range(num_ranks)]
            report = supervisor.run([sys.executable, *command], environments)
            if report.failed_rank is None:
                shutil.rmtree(logs, ignore_errors=True)
                return report.code
            will_restart = attempt < max_restarts and not supervisor.signal
            last_stage = store.last_heartbeat(store.open_attempt(job_store, attempt, num_ranks), report.failed_rank)
            advice = f"all ranks restart from the last checkpoint (restart {attempt + 1} of {max_restarts})"
            if not will_restart:
                name = next((argument for argument in command if argument.startswith("run.name=")), "run.name=NAME")
                advice = remedy or f"continue from the last checkpoint with {name} run.resume=true"
            if report.is_silent or will_restart:
                stage_text = f"in {last_stage}" if last_stage else "before its first step"
                print(
                    f"shardwright: {report.description} {stage_text}; its log: "
                    f"{supervisor.log_path(report.failed_rank)}; {advice}",
                    file=sys.stderr,
                    flush=True,
                )
            if not will_restart:
                return report.code
    raise AssertionError


def _rank_environment(rank: int, num_ranks: int, port: int) -> dict[str, str]:
    """Environment of a rank, with torchrun's variables.

    Gloo listens on loopback only, even if the user has set GLOO_SOCKET_IFNAME. A rank that crashes writes its traceback
    to its log.
    """
    from shardwright.comm import store

    return {
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": store.LOOPBACK,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "GLOO_SOCKET_IFNAME": store.LOOPBACK_INTERFACE,
        "PYTHONFAULTHANDLER": "1",
        LAUNCHER_PID: str(os.getpid()),
    }


def _slurm_environment(environ: "os._Environ[str]") -> dict[str, str]:
    """torchrun's environment variables, from those that slurm sets for this task."""
    match = re.match(r"([^\[,]+)(?:\[(\d+))?", environ.get("SLURM_STEP_NODELIST", ""))
    if not match:
        raise UserError("slurm set no SLURM_STEP_NODELIST; set RANK, WORLD_SIZE and MASTER_ADDR as torchrun does")
    first_host = match[1] + (match[2] or "")
    nodes = int(environ.get("SLURM_STEP_NUM_NODES", environ.get("SLURM_NNODES", "1")))
    tasks_per_node = str(-(-int(environ["SLURM_NTASKS"]) // nodes))  # without --ntasks-per-node, slurm does not set it
    return {
        "RANK": environ["SLURM_PROCID"],
        "WORLD_SIZE": environ["SLURM_NTASKS"],
        "LOCAL_RANK": environ.get("SLURM_LOCALID", "0"),
        "LOCAL_WORLD_SIZE": environ.get("SLURM_NTASKS_PER_NODE", tasks_per_node),
        "MASTER_ADDR": environ.get("MASTER_ADDR", first_host),
        "MASTER_PORT": environ.get("MASTER_PORT", str(SLURM_PORT + int(environ.get("SLURM_JOB_ID", "0")) % 10_000)),
    }
