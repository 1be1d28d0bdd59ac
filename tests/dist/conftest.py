from collections.abc import Iterator

import pytest
from pool import Pool


@pytest.fixture(scope="session")
def ranks() -> Iterator[Pool]:
    """`ranks.run(world, function, *args)`: one pool of rank processes for the session."""
    pool = Pool()
    yield pool
    pool.close()
