"""Table servers as processes of their own."""

import shutil
import signal
import subprocess
import sys
from pathlib import Path

START_SECONDS = 60


class ServerProcess:
    """`shardwright serve-tables`, which can be killed and started again at the same address."""

    def __init__(self, journal: Path | None = None) -> None:
        self._journal = journal
        self.address = "tcp://127.0.0.1:0"
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "shardwright.cli", "serve-tables", "--bind", self.address]
        command += ["--journal", str(self._journal)] if self._journal is not None else []
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("serving tcp://"), line + self.process.stdout.read()
        self.address = line.split()[1]

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(START_SECONDS)
        self._close_output()

    def start_anew(self) -> None:
        """Start again without the journal: after a kill, a server waits a minute for the ranks of the last run."""
        self.kill()
        if self._journal is not None:
            shutil.rmtree(self._journal)
        self.start()

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(START_SECONDS)
        self._close_output()

    def _close_output(self) -> None:
        assert self.process.stdout is not None
        self.process.stdout.close()
