"""What every test starts from: a fixed seed, uninitialised memory that is NaN, Triton interpreted without a GPU."""

import glob
import os
import signal
from collections.abc import Iterator

import pytest
from hypothesis import settings

settings.register_profile("no deadline", deadline=None)  # a busy machine is slow, which is no fault of an example
settings.load_profile("no deadline")
if not glob.glob("/dev/nvidia[0-9]*"):
    os.environ["TRITON_INTERPRET"] = "1"

# Under nohup, or in the background of a shell, these are ignored, and so they would be in every run a test starts.
for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, usual)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--bless", action="store_true", help="accept the plans of tests/golden as they are now")


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    """torch.empty gives NaN (and the largest integer), so that nothing can rely on memory nobody wrote."""
    import torch

    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)
