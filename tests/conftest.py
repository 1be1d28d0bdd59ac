"""Setup of every test: a fixed seed, uninitialized memory filled with NaN, the Triton interpreter without a GPU."""

import glob
import os
import signal
from collections.abc import Iterator

import pytest
from hypothesis import settings

settings.register_profile("no deadline", deadline=None)  # on a loaded machine any example can be slow
settings.load_profile("no deadline")
if not glob.glob("/dev/nvidia[0-9]*"):
    os.environ["TRITON_INTERPRET"] = "1"

# Under nohup, or in the background of a shell, these signals are ignored; processes of tests would inherit this.
for number, default in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, default)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--bless", action="store_true", help="accept the current plans as snapshots of tests/golden")


@pytest.fixture(autouse=True)
def deterministic_and_poisoned() -> Iterator[None]:
    """Deterministic algorithms; torch.empty is filled with NaN or the largest integer, so that its use is noticed."""
    import torch

    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)
