"""A pool of rank processes for a whole test session: importing torch takes seconds, a job in the pool milliseconds."""

import faulthandler
import importlib
import multiprocessing
import os
import signal
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

SIZE = 4
NO_ANSWER = "no answer in time"
STACK_SECONDS = 2.0  # until a rank has written its stacks
IMPORT_SECONDS = 240.0  # of the module of a function: all of Shardwright, while other tests run


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def import_module(name: str) -> None:
    importlib.import_module(name)


def serve(rank: int, pipe: Any, stacks: str) -> None:
    """Main loop of a pool process: run functions received through the pipe as this rank, send back their results.

    SIGUSR1 writes the stacks of all threads into the file `stacks`."""
    faulthandler.register(signal.SIGUSR1, open(stacks, "w"), all_threads=True)  # noqa: SIM115
    os.environ["RES_OPTIONS"] = "timeout:1 attempts:1"  # torch's store does reverse DNS lookups, which fail
    import torch

    torch.set_num_threads(1)
    while (request := pipe.recv()) is not None:
        job, function, world, port, args = request
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        try:
            torch.manual_seed(0)
            pipe.send((job, True, function(*args)))
        except BaseException:
            pipe.send((job, False, traceback.format_exc()))
        finally:
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()


class Pool:
    def __init__(self) -> None:
        self._jobs = 0
        self._folder = tempfile.TemporaryDirectory()
        self._pipes, self._processes, self._imported = [], [], list[set[str]]()
        self._start(SIZE)

    def _start(self, num_ranks: int) -> None:
        """Start the ranks that are missing; few tests need more than SIZE."""
        context = multiprocessing.get_context("spawn")
        for rank in range(len(self._pipes), num_ranks):
            pipe, rank_end = context.Pipe()
            process = context.Process(target=serve, args=(rank, rank_end, self._stacks_file(rank)), daemon=True)
            process.start()
            self._pipes.append(pipe)
            self._processes.append(process)
            self._imported.append(set())

    def run(self, world: int, function: Callable[..., Any], *args: Any, seconds: float = 180.0) -> list[Any]:
        """Call a module-level function in the first `world` ranks; returns the results by rank, fails on exceptions."""
        self._start(world)
        if not all(function.__module__ in imported for imported in self._imported[:world]):
            self._run(world, import_module, function.__module__, seconds=IMPORT_SECONDS)
            for imported in self._imported[:world]:
                imported.add(function.__module__)
        return self._run(world, function, *args, seconds=seconds)

    def _run(self, world: int, function: Callable[..., Any], *args: Any, seconds: float) -> list[Any]:
        port = free_port()
        self._jobs += 1
        for pipe in self._pipes[:world]:
            pipe.send((self._jobs, function, world, port, args))
        deadline = time.monotonic() + seconds
        answers = [self._receive_answer(rank, deadline) for rank in range(world)]
        failures = [f"rank {rank}:\n{result}" for rank, (succeeded, result) in enumerate(answers) if not succeeded]
        if any(not succeeded and result == NO_ANSWER for succeeded, result in answers):
            failures += self._restart()
        assert not failures, "\n".join(failures)
        return [result for _, result in answers]

    def _receive_answer(self, rank: int, deadline: float) -> tuple[bool, Any]:
        """(succeeded, result or traceback) of the current job; late answers to earlier jobs are dropped."""
        while self._pipes[rank].poll(max(0.0, deadline - time.monotonic())):
            job, succeeded, result = self._pipes[rank].recv()
            if job == self._jobs:
                return succeeded, result
        return False, NO_ANSWER

    def _restart(self) -> list[str]:
        """End all ranks, so that one that hangs fails no later test; returns the stacks of each."""
        for process in self._processes:
            if process.is_alive():
                os.kill(process.pid or 0, signal.SIGUSR1)
        time.sleep(STACK_SECONDS)
        stacks = [
            f"stacks of rank {rank}:\n{Path(self._stacks_file(rank)).read_text()}"
            for rank in range(len(self._processes))
        ]
        for process in self._processes:
            process.kill()
        self._stop(0.0)
        self._start(SIZE)
        return stacks

    def _stacks_file(self, rank: int) -> str:
        return os.path.join(self._folder.name, f"stacks-{rank}.txt")

    def close(self) -> None:
        for pipe in self._pipes:
            with suppress(OSError):  # its process is gone
                pipe.send(None)
        self._stop(5.0)
        self._folder.cleanup()

    def _stop(self, seconds: float) -> None:
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            process.join(seconds)
            process.kill()
            pipe.close()
        self._pipes, self._processes, self._imported = [], [], []
