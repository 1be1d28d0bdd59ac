"""No read misses more than pull + (N - 1) x push updates of other ranks, and no update is lost: with rows on ranks and
on servers, whatever windows, cache sizes, delays and faults are drawn."""

from collections import Counter
from contextlib import ExitStack

import pytest
from counted_reads import EVERY_FAULT, FAULTS, RANKS, SERVERS, assert_within_bound, cases, run_case
from drawn import examples
from hypothesis import Phase, example, given, seed, settings
from table_servers import ServerProcess


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    """By owners of rows, servers of one run after another, with journals."""
    with ExitStack() as stack:
        servers = [ServerProcess(tmp_path_factory.mktemp("journal")) for _ in range(2)]
        for server in servers:
            stack.callback(server.stop)
        yield {RANKS: [], SERVERS: servers}


@examples(4)
@pytest.mark.parametrize("owners", (RANKS, SERVERS))
def test_reads_miss_no_more_than_the_bound_and_no_update_is_lost(ranks, processes, tmp_path, owners, examples):
    fired = Counter()

    @seed(0)
    @settings(database=None, max_examples=examples, phases=(Phase.explicit, Phase.generate))
    @example(EVERY_FAULT[owners])
    @given(cases(owners))
    def check_example(case):
        answers, of_case = run_case(ranks, case, processes[owners], tmp_path)
        fired.update(of_case)
        assert_within_bound(case, answers)

    check_example()
    assert all(fired[fault] for fault in FAULTS[owners]), fired
