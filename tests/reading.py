"""Start readers as separate processes, for tests: `with reader(source) as address`."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shardwright.data.sources.source import NumpyBatch
from shardwright.errors import UserError


@dataclass(frozen=True)
class Samples:
    """Sample i has id i, and id i + 1 if odd. Every `take` appends its process id to the file `log`, if given."""

    size: int | None
    log: str = ""
    seconds: float = 0.0
    invalid: int = -1  # a sample that raises UserError
    buggy: int = -1  # a sample that raises KeyError

    def take(self, indices: np.ndarray) -> NumpyBatch:
        if self.log:
            with open(self.log, "a") as log:
                log.write(f"{os.getpid()}\n")
        time.sleep(self.seconds)
        if self.invalid in indices:
            raise UserError(f"sample {self.invalid} is invalid; drop it")
        if self.buggy in indices:
            raise KeyError("a bug")
        lengths = np.stack([indices % 2, np.ones_like(indices)])
        values = np.concatenate([indices[indices % 2 == 1] + 1, indices])
        dense = np.stack([indices / 7, indices * 0.5], 1).astype(np.float32)
        labels = {"y": indices.astype(np.float32), "rare": indices % 5 == 0}
        return NumpyBatch(("more", "id"), values, lengths, dense, labels, 1 + indices.astype(np.float32) % 3)


def start(
    source: object, address: str = "tcp://127.0.0.1:0", keys: str = "", workers: int = 1, **order: Any
) -> tuple[subprocess.Popen, str]:
    """Start a reader; returns its process and its address."""
    arguments = {"source": repr(source), "bind": address, "keys": keys, "workers": workers, "order": order}
    process = subprocess.Popen([sys.executable, __file__, json.dumps(arguments)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, process.stdout.readline().split()[-1]


def end(process: subprocess.Popen, number: int = signal.SIGTERM) -> int:
    """Send a signal and wait; returns the exit status."""
    process.send_signal(number)
    status = process.wait()
    if process.stdout is not None:
        process.stdout.close()
    return status


@contextmanager
def reader(source: object, **options: Any) -> Iterator[str]:
    process, address = start(source, **options)
    try:
        yield address
    finally:
        assert end(process) == 0


def serve(bind: str, source: str, keys: str, workers: int, order: dict[str, Any]) -> None:
    """Main function of the reader process."""
    import reading

    from shardwright.comm.transport.keys import load_keys
    from shardwright.data.readers.service import ReaderService
    from shardwright.data.sources.source import Subset, make_order
    from shardwright.data.sources.stream import GrowingLog
    from shardwright.data.sources.synthetic import ClickStream

    assert "torch" not in sys.modules
    names = {
        "Samples": reading.Samples,
        "Window": Subset,
        "ClickStream": ClickStream,
        "GrowingLog": GrowingLog,
    }
    samples = eval(source, names)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sample_order, client_keys = make_order(samples, **order), load_keys(keys, "reader")
    service = ReaderService(samples, sample_order, bind=bind, workers=workers, keys=client_keys)
    try:
        print(service.address, flush=True)
        service.run(print)
    except KeyboardInterrupt:
        service.close()
    except UserError as error:
        service.close()
        print(error, flush=True)
        sys.exit(2)


def lines(path: Path) -> list[str]:
    return path.read_text().split() if path.exists() else []


if __name__ == "__main__":
    serve(**json.loads(sys.argv[1]))
