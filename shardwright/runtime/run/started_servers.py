"""Table servers that a run starts on its host, as child processes that end with it.

A server that was killed is started again at its address, with its journal, and the run goes on. Servers have sessions
of their own: Ctrl-C and signals to a group of processes do not reach them, since a run that stops still needs them to
write its checkpoint.
"""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from threading import Event, Thread

from shardwright.errors import UserError
from shardwright.runtime.launch.supervisor import describe_exit

FOLDER = "servers"  # in the run's directory: output and journals
ANY_PORT = "tcp://127.0.0.1:0"
SERVING = "serving "  # begins the line with a server's address
START_SECONDS = 120.0
POLL_SECONDS = 0.1
QUICK_SECONDS = 10.0  # a server that ends so soon after its start, several times in a row, is not started again
MAX_QUICK_ENDS = 3
ERROR_CODE = 2  # of a server that has printed why it cannot go on


class StartedServer:
    """One of them. `folder`: of the run's servers."""

    def __init__(self, number: int, folder: Path) -> None:
        self.number, self.address = number, ANY_PORT
        self.output, self.journal = folder / f"server-{number}.log", folder / f"journal-{number}"
        self._quick_ends = 0
        self.start()

    def start(self) -> None:
        self._first = self.output.stat().st_size if self.output.exists() else 0
        command = [sys.executable, "-m", "shardwright.cli", "serve-tables", "--bind", self.address]
        command += ["--journal", str(self.journal), "--parent", str(os.getpid())]
        with self.output.open("ab") as output:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._started_at = time.monotonic()

    def find_address(self) -> bool:
        """Whether the server has printed its address."""
        for line in self._own_output().splitlines(keepends=True):
            if line.startswith(SERVING) and line.endswith("\n"):
                self.address = line.removeprefix(SERVING).strip()
        return self.address != ANY_PORT

    def restart_if_ended(self) -> str:
        """A line about it; empty if the server runs."""
        if (code := self.process.poll()) is None:
            return ""
        self._quick_ends = self._quick_ends + 1 if time.monotonic() - self._started_at < QUICK_SECONDS else 0
        if self.has_failed:
            return self.describe_failure()
        self.start()
        return f"table server {self.number} {describe_exit(code)}; started again with its journal"

    @property
    def has_failed(self) -> bool:
        return self.process.returncode == ERROR_CODE or self._quick_ends >= MAX_QUICK_ENDS

    def describe_failure(self) -> str:
        lines = self._own_output().split("\n")
        last = next((line for line in reversed(lines) if line.strip()), "no output").removeprefix("shardwright: ")
        code = self.process.poll()
        ended = "has not started" if code is None else describe_exit(code)
        return f"table server {self.number} {ended}: {last}; its output: {self.output}"

    def _own_output(self) -> str:
        """What it has printed since it was started last."""
        return self.output.read_bytes()[self._first :].decode(errors="replace") if self.output.exists() else ""

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


class StartedServers:
    """Starts `num` servers, and watches them until closed. A thread starts them, since the kernel ends them with the
    thread that did."""

    def __init__(self, num: int, folder: Path) -> None:
        self.servers: list[StartedServer] = []
        self._num, self._folder, self._failure = num, folder, ""
        self._is_ready, self._ends = Event(), Event()
        self._remove_journals()  # of a run that was killed
        folder.mkdir(exist_ok=True)
        self._thread = Thread(target=self._watch, name="table servers", daemon=True)
        self._thread.start()
        self._is_ready.wait()
        if self._failure:
            self.close()
            raise UserError(self._failure)

    @property
    def addresses(self) -> tuple[str, ...]:
        return tuple(server.address for server in self.servers)

    def _watch(self) -> None:
        try:
            self._start()
        except (UserError, OSError) as error:
            self._failure = str(error)
        self._is_ready.set()
        while not self._ends.wait(POLL_SECONDS):
            for server in self.servers:
                if not server.has_failed and (line := server.restart_if_ended()):
                    print(f"shardwright: {line}", file=sys.stderr, flush=True)
        for server in self.servers:
            server.kill()

    def _start(self) -> None:
        self.servers.extend(StartedServer(number, self._folder) for number in range(self._num))
        deadline = time.monotonic() + START_SECONDS
        for server in self.servers:
            while not server.find_address():
                if server.process.poll() is not None or time.monotonic() > deadline:
                    raise UserError(server.describe_failure())
                time.sleep(POLL_SECONDS)

    def _remove_journals(self) -> None:
        for journal in self._folder.glob("journal-*"):
            shutil.rmtree(journal)

    def close(self) -> None:
        """End the servers; their output stays in the folder."""
        self._ends.set()
        self._thread.join()
        self._remove_journals()
