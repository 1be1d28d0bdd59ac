"""Two ranks on one GPU equal one process; skipped without a GPU. Not run on one yet: dist/test_fake_gpu_ranks.py fakes
it."""

from collections.abc import Iterator

import pytest
import torch
from pool import Pool
from test_fake_gpu_ranks import FORMS, check_ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(scope="module")
def ranks() -> Iterator[Pool]:
    pool = Pool()
    yield pool
    pool.close()


@pytest.mark.parametrize("form, optimizer, overlap", FORMS)
def test_two_ranks_on_one_gpu_equal_one_process(ranks, form, optimizer, overlap):
    check_ranks(ranks, form, optimizer, overlap, is_fake=False)
