"""Rank processes kept for a whole test session: importing torch takes seconds, a job on them milliseconds."""

import multiprocessing
import os
import socket
import time
import traceback
from collections.abc import Callable
from typing import Any

SIZE = 4


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def serve(rank: int, pipe: Any) -> None:
    """Run what comes down the pipe as this rank of a job."""
    os.environ["RES_OPTIONS"] = "timeout:1 attempts:1"  # torch's store looks up names of addresses, in vain
    import torch

    torch.set_num_threads(1)
    while (asked := pipe.recv()) is not None:
        job, function, world, port, words = asked
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        try:
            torch.manual_seed(0)
            pipe.send((job, True, function(*words)))
        except BaseException:
            pipe.send((job, False, traceback.format_exc()))
        finally:
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()


class Pool:
    def __init__(self) -> None:
        self._jobs = 0
        context = multiprocessing.get_context("spawn")
        self._pipes, self._processes = [], []
        for rank in range(SIZE):
            mine, theirs = context.Pipe()
            process = context.Process(target=serve, args=(rank, theirs), daemon=True)
            process.start()
            self._pipes.append(mine)
            self._processes.append(process)

    def run(self, world: int, function: Callable[..., Any], *words: Any, seconds: float = 60.0) -> list[Any]:
        """What the function returned on each of the first `world` ranks; it has to be a module's own."""
        port = free_port()
        self._jobs += 1
        for pipe in self._pipes[:world]:
            pipe.send((self._jobs, function, world, port, words))
        ends = time.monotonic() + seconds
        answers = [self._answer(rank, ends) for rank in range(world)]
        failed = [f"rank {rank}:\n{told}" for rank, (fine, told) in enumerate(answers) if not fine]
        assert not failed, "\n".join(failed)
        return [told for _, told in answers]

    def _answer(self, rank: int, ends: float) -> tuple[bool, Any]:
        """Of this job: one that came too late for an earlier job is dropped."""
        while self._pipes[rank].poll(max(0.0, ends - time.monotonic())):
            job, fine, told = self._pipes[rank].recv()
            if job == self._jobs:
                return fine, told
        return False, "no answer in time"

    def close(self) -> None:
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            pipe.send(None)
            process.join(5)
            process.kill()
            pipe.close()
