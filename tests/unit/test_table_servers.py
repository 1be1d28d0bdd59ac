"""Table servers without processes: messages that are late, lost, repeated, damaged or wrong, journals, and sockets."""

import errno
import gc
import json
import random
import sys
import threading
import time
import warnings
import zlib
from collections import Counter
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import count, product
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.comm.transport.arrays import CHECK_BYTES, Message, decode_message
from shardwright.comm.transport.contexts import KeptContext
from shardwright.comm.transport.keys import connect_dealer, create_key_files, load_keys, secure_socket
from shardwright.comm.transport.servers import Caller, ServerConnector, TableServers
from shardwright.embeddings.copies.updates import RowUpdates, squares_of
from shardwright.embeddings.service import call_handler, calls, owned_rows
from shardwright.embeddings.service.call_handler import LOST, CallHandler
from shardwright.embeddings.service.journal import CallJournal
from shardwright.embeddings.service.owned_rows import GroupRead, GroupSpec, OwnedRows, OwnedSpec, Place, Push
from shardwright.embeddings.service.server import TableServer
from shardwright.embeddings.service.shard_stores import ShardStores, StoreSpec, Swap
from shardwright.errors import UserError
from shardwright.spec.optimizer import SGD, AdaGrad, Adam

GROUPS = (GroupSpec("a, b", 12, 3, "float64", 0), GroupSpec("c", 5, 2, "float64", 0))
TORCH = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "adam": torch.optim.Adam}


def make_pushes(spec, num_rounds, seed=0):
    """By round and rank. With Adam, rank 0 updates all rows, since torch's dense step does so."""
    generator, pushes = torch.Generator().manual_seed(seed), [[] for _ in range(num_rounds)]
    for round_, rank in product(range(num_rounds), range(spec.num_ranks)):
        updates = []
        for group in spec.groups:
            num = int(torch.randint(0, group.rows + 1, (), generator=generator))
            num = group.rows if rank == 0 and isinstance(spec.optimizer, Adam) else num
            rows = torch.randperm(group.rows, generator=generator)[:num]
            sums = torch.randn(num, group.dim, dtype=torch.float64, generator=generator)
            updates.append(
                RowUpdates(rows, torch.ones_like(rows), torch.ones_like(rows), sums, squares_of(spec.optimizer, sums))
            )
        pushes[round_].append(Push(spec.optimizer, (round_ + 1,) * len(spec.groups), tuple(updates)))
    return pushes


def decoded(frames):
    return decode_message([zmq.Frame(bytes(frame)) for frame in frames])


CALL_NUMBERS = count(1)


def numbered(message, rank=0, number=None, run="r"):
    identity = {"run": run, "rank": rank, "server": 0, "connection": "step"}
    number = next(CALL_NUMBERS) if number is None else number
    return Message({**identity, "number": number, **message.header}, message.arrays)


def ask(handler, message, client=b"rank", run="r"):
    """The header of the reply, with its arrays."""
    ((_, reply),) = handler.handle(client, decoded(numbered(message, run=run).encode()))
    return {**reply.header, "values": [array.tolist() for array in decoded(reply.encode()).arrays]}


def send(handler, messages):
    assert not any("error" in ask(handler, message) for message in messages)
    return handler


def state(handler):
    """The round, and copies of all rows, their optimizer state and versions, and those of snapshots."""
    owned = handler._owned or OwnedRows(OwnedSpec(0, 1, SGD(1.0), ()))
    snapshots = [part for each in owned._snapshots.values() for parts in each.parts for part in parts.values()]
    snapshots += [rows for _, rows in owned.stores.snapshots.values()]
    return [torch.tensor(owned.round), *(part.clone() for part in [*owned.all_parts(), *snapshots])]


def is_equal(first, second):
    return len(first) == len(second) and all(map(torch.equal, first, second))


@settings(max_examples=60)
@given(st.sampled_from((SGD(0.1), AdaGrad(0.1), Adam(0.1))), st.integers(1, 4), st.integers(1, 5), st.data())
def test_rows_do_not_depend_on_the_order_of_arrival_and_equal_torch(optimizer, num_ranks, num_rounds, data):
    spec = OwnedSpec(0, num_ranks, optimizer, GROUPS)
    pushes = make_pushes(spec, num_rounds, data.draw(st.integers(0, 2**31)))
    in_order, drawn, rounds = OwnedRows(spec), OwnedRows(spec), [0] * num_ranks
    for (round_, by_rank), rank in product(enumerate(pushes), range(num_ranks)):
        assert in_order.push(rank, round_, by_rank[rank])
    while ready := [rank for rank in range(num_ranks) if rounds[rank] < min(num_rounds, drawn.round + 2)]:
        rank = data.draw(st.sampled_from(ready))
        assert drawn.push(rank, rounds[rank], pushes[rounds[rank]][rank])
        rounds[rank] += 1
    assert drawn.round == in_order.round == num_rounds
    assert all(map(torch.equal, drawn.all_parts(), in_order.all_parts())), "to the bit"
    for index, group in enumerate(GROUPS):
        weight, versions = torch.nn.Parameter(torch.zeros(group.rows, group.dim).double()), torch.zeros(group.rows)
        dense = TORCH[optimizer.kind]([weight], lr=optimizer.lr)
        for by_rank in pushes:
            weight.grad = torch.zeros_like(weight)
            for updates in (push.updates[index] for push in by_rank):
                weight.grad.index_add_(0, updates.rows_V, updates.sums_VD)
                versions[updates.rows_V] += 1
            dense.step()
        torch.testing.assert_close(drawn.parts(index)["weight"], weight.data, rtol=0, atol=1e-10)
        assert torch.equal(drawn.clocks[index].version_E, versions.long())


def train(spec, pushes, chance=None):
    """A handler after the calls of ranks, what they read, and the faults of the network between them."""
    handler, fired, messages, replies = CallHandler(), Counter(), {}, {}
    reads = [GroupRead(torch.arange(group.rows), torch.full((group.rows,), -1)) for group in spec.groups]
    send(handler, [calls.open_call(spec)])
    for round_, rank in product(range(len(pushes)), range(spec.num_ranks)):
        two = (calls.read_call(round_, reads), calls.push_call(round_, pushes[round_][rank]))
        messages |= {(rank, 2 * round_ + i): numbered(message, rank, 2 * round_ + i) for i, message in enumerate(two)}
    while unanswered := [key for key in messages if key not in replies]:
        # A rank pushes the updates of a round and reads for the next one when it has read for the round.
        ready = [key for key in unanswered if all((key[0], read) in replies for read in range(0, key[1], 2))]
        ping = numbered(Message({"call": "ping", "without_reply": [number for _, number in ready]}), number=0)
        missing = {rank: handler.handle(bytes([rank]), ping)[0][1].header["missing"] for rank in range(spec.num_ranks)}
        ready = [(rank, number) for rank, number in ready if number in missing[rank]]
        rank, number = chance.choice(ready) if chance else ready[0]
        fault = chance.choice(("", "", "lost", "damaged", "reply lost", "again")) if chance else ""
        rank, number = chance.choice([*replies]) if fault == "again" and replies else (rank, number)
        message, frames = messages[rank, number], [bytearray(frame) for frame in messages[rank, number].encode()]
        fired.update([fault, "old push"] if number % 2 and number // 2 < handler._owned.round else [fault])
        if fault == "damaged":
            frame = chance.choice([frame for frame in frames if frame])
            frame[chance.randrange(len(frame))] ^= chance.randrange(1, 256)
            assert decoded(frames) is None
        elif fault != "lost":
            received = handler.handle(bytes([rank]), decoded(frames))
            fired["waits"] += message.header["call"] == "read" and not received
            for client, reply in received if fault != "reply lost" else ():
                assert "error" not in reply.header
                replies.setdefault((client[0], reply.header["number"]), decoded(reply.encode()))
    return state(handler), {key: [array.tolist() for array in replies[key].arrays] for key in messages}, fired


def test_messages_that_are_late_lost_repeated_or_damaged_change_nothing():
    fired, spec = Counter(), OwnedSpec(0, 3, AdaGrad(0.1), GROUPS)
    for seed in range(15):
        pushes = make_pushes(spec, 5, seed)
        expected, drawn = train(spec, pushes), train(spec, pushes, random.Random(seed))
        assert is_equal(drawn[0], expected[0]) and drawn[0][0] == 5 and drawn[1] == expected[1], "reads are exact"
        fired += drawn[2]
    assert min(fired[kind] for kind in ("lost", "damaged", "reply lost", "again", "old push", "waits")) > 20


ONE_RANK = OwnedSpec(0, 1, AdaGrad(0.1), (GroupSpec("t", 6, 2, "float64", 0),), (StoreSpec("s", 6, 4, "float64"),))
ROUND = SNAPSHOT = 1  # after one push
ROWS, ONES, VALUES = np.array([1, 2], np.int32), np.ones(2, np.int32), np.ones((2, 4))
PLACE = {"group": 0, "part": "weight"}
VALID = {
    "read": Message({"round": ROUND}, [ROWS, -ONES]),
    "push": Message(
        {"round": ROUND, "steps": [1], "lr": 0.1, "is_last": False, "part": 0, "num_parts": 1},
        [ROWS, ONES, ONES, VALUES],
    ),
    "put": Message({"columns": [0, 2], **PLACE}, [ROWS, VALUES[:, :2]]),
    "get": Message({"snapshot": SNAPSHOT, **PLACE}, [ROWS]),
    "draw": Message({"group": 0, "seed": 7, "bound": 0.5}, [ROWS, ROWS]),
    "swap": Message({"stores": [0]}, [ROWS, VALUES, ROWS]),
    "keep": Message({"store": 0, "snapshot": "other"}),
    "read_kept": Message({"store": 0, "snapshot": "kept", "first": 1, "num": 2}),
    "drop": Message({"store": 0, "snapshot": "kept"}),
    "snapshot": Message({"holder": "other"}),
    "release": Message({"holder": "holder", "snapshot": SNAPSHOT}),
    "ping": Message({"without_reply": [1]}),
    "close": Message({}),
    "open": calls.open_call(ONE_RANK),
}
VALID = {name: numbered(Message({"call": name, **each.header}, each.arrays)) for name, each in VALID.items()}
NO_INTEGER = [..., None, "0", 1.5, True, [], [[0]], {}, 10**30, -(10**30)]  # ...: without the field
NO_TEXT, NO_LIST = [..., None, 5, [], {}], [..., None, 1, "1", [1.5], [[1]], {}]
WRONG_FIELDS = {
    "read": {"round": [*NO_INTEGER, 1 << 40], "number": NO_INTEGER, "run": [*NO_TEXT, "other"], "call": NO_TEXT},
    "push": {"round": [*NO_INTEGER, ROUND + 2, 1 << 40], "rank": [*NO_INTEGER, -1, 1]}
    | {"steps": [*NO_LIST, [], [1, 1], [-1], [10**30]], "lr": [None, "0.1", [], 10**400, float("nan"), float("inf")]}
    | {"is_last": [..., None, 0, 1, "true"], "part": [*NO_INTEGER, -1, 1], "num_parts": [*NO_INTEGER, 0, -1, 1 << 40]},
    "put": {
        "connection": NO_TEXT,
        "columns": [*NO_LIST, [0], [0, 1, 2], [1, 0], [-1, 1], [0, 3], [0, 10**30], [[0, 2]]],
    }
    | {"group": [*NO_INTEGER, -1, 1], "part": [*NO_TEXT, "mean"], "snapshot": [*NO_INTEGER[1:], 99, SNAPSHOT]},
    "get": {"group": [*NO_INTEGER, -1, 1], "part": [*NO_TEXT, "mean"], "snapshot": [*NO_INTEGER[1:], 99]},
    "draw": {"group": [*NO_INTEGER, -1, 1], "seed": NO_INTEGER, "bound": [None, "0.1", [], float("nan"), 10**400]},
    "swap": {"stores": [*NO_LIST, [], [0, 0], [1], [-1], [10**30]]},
    "keep": {"store": [*NO_INTEGER, -1, 1], "snapshot": NO_TEXT},
    "read_kept": {"store": [*NO_INTEGER, -1, 1], "snapshot": [*NO_TEXT, "no"]}
    | {"first": [*NO_INTEGER, -1, 5, 1 << 40], "num": [*NO_INTEGER, -1, 6, 1 << 40]},
    "drop": {"store": NO_INTEGER, "snapshot": NO_TEXT},
    "snapshot": {"holder": NO_TEXT, "call": ["unknown", "rows"], "server": [*NO_INTEGER, 1]},
    "release": {"holder": NO_TEXT, "snapshot": NO_INTEGER},
    "ping": {"without_reply": NO_LIST},
    "close": {"rank": [*NO_INTEGER, -1, 1]},
    "open": {"version": [..., None, 1, "2"], "spec": [..., None, [], {}, 1], "run": [*NO_TEXT, "other"]},
}
NO_WORDS = [ROWS.reshape(1, 2), *(ROWS.astype(kind) for kind in ("f8", "?", "u1", "i2", ">i4", ">i8", "g"))]
LENGTHS = [ROWS[:1], ROWS[:0], np.arange(3), np.array(1)]
NO_ROWS = NO_WORDS + [np.array([1, row]) for row in (6, -1, 1 << 40, -(1 << 62))]
NO_COUNTS = NO_WORDS + LENGTHS + [np.array([1, count]) for count in (-1, 1 << 40, 1 << 62)]
NO_VERSIONS = NO_WORDS + LENGTHS + [np.array([-1, version]) for version in (-2, 9, -(1 << 40), -(1 << 62))]
SHAPES = ((8,), (2, 1), (2, 3), (2, 5), (3, 4), (2, 4, 1), (1, 2, 4), (), (2, 0))
NO_VALUES = [np.ones(shape) for shape in SHAPES] + [VALUES.astype(kind) for kind in ("f4", "f2", "i8", ">f8", "g")]
WRONG_ARRAYS = {
    "read": (NO_ROWS + LENGTHS, NO_VERSIONS),
    "push": (NO_ROWS + LENGTHS, NO_COUNTS, NO_COUNTS, NO_VALUES),
    "put": (NO_ROWS + LENGTHS, [*NO_VALUES, VALUES[:, :2].astype("f4")]),
    "get": (NO_ROWS,),
    "draw": (NO_ROWS + LENGTHS, NO_WORDS + LENGTHS),
    "swap": (NO_ROWS + LENGTHS, NO_VALUES, NO_ROWS),
}


def begun_handler():
    """A handler after a round, with a snapshot."""
    handler = send(CallHandler(), [calls.open_call(ONE_RANK), calls.push_call(0, make_pushes(ONE_RANK, 1)[0][0])])
    with mock.patch.object(owned_rows.secrets, "randbits", return_value=SNAPSHOT):
        assert ask(handler, Message({"call": "snapshot", "holder": "holder"}))["snapshot"] == SNAPSHOT
    return send(handler, [Message({"call": "keep", "store": 0, "snapshot": "kept"})])


def wrong_calls(name):
    header, arrays = VALID[name].header, [*VALID[name].arrays]
    for field, value in ((field, value) for field, values in WRONG_FIELDS[name].items() for value in values):
        changed = {key: each for key, each in {**header, field: value}.items() if each is not ...}
        yield f"{field} {value!r:.20}", Message(changed, arrays)
    for others in (arrays[:-1], [*arrays, ROWS], arrays * 2) if arrays else ():
        yield f"{len(others)} arrays", Message(header, others)
    for position, wrong in enumerate(WRONG_ARRAYS.get(name, ())):
        for array in wrong:
            others = [*arrays[:position], array, *arrays[position + 1 :]]
            yield f"array {position}: {array.dtype.str} {array.shape} {array.ravel()[-1:]}", Message(header, others)


def fault_of(message):
    """What a handler does wrong with a message that no rank sends; empty: it refuses it."""
    handler = begun_handler()
    before = state(handler)
    try:
        if (received := decoded(message.encode())) is None:
            return ""  # counted by the server
        replies = handler.handle(b"rank", received)
        if not is_equal(before, state(handler)):
            return "changes rows"
        if not handler.served.malformed and not any("error" in reply.header for _, reply in replies):
            return "accepts it"
        handler.handle(b"rank", VALID["push"])
        return "" if handler._owned.round == ROUND + 1 else "refuses valid calls then"
    except Exception as error:
        return f"raises {type(error).__name__}"


@pytest.mark.parametrize("name", VALID)
def test_calls_that_no_rank_makes_are_refused(name):
    handler = begun_handler()
    assert "error" not in ask(handler, VALID[name]) and not handler.served.malformed
    faults = {what: fault_of(message) for what, message in wrong_calls(name)}
    assert not {what: fault for what, fault in faults.items() if fault}


@pytest.mark.parametrize("name", ("num_ranks", "rows", "dim", "pull"))
def test_runs_that_cannot_be_are_refused(name):
    for value in (-1, 1 << 62, 1 << 70):
        spec = calls.open_call(ONE_RANK).header["spec"]
        spec |= {name: value} if name == "num_ranks" else {"groups": [{**spec["groups"][0], name: value}]}
        assert "error" in ask(CallHandler(), Message({"call": "open", "version": calls.VERSION, "spec": spec})), value


TYPES = st.sampled_from(("<i4", "<i8", "<f8", "|b1", ">i4", "O", "(2,)i4", "(,)i4", "i4,(", "M8[ns]")) | st.text()
ARRAYS = st.lists(st.tuples(TYPES, st.lists(st.integers(-2, 9), max_size=3), st.just(0)), max_size=3)


@settings(max_examples=200)
@given(st.sampled_from([*VALID]), ARRAYS, st.lists(st.binary(), max_size=3))
def test_garbage_changes_nothing(name, arrays, frames):
    """The header has no rank and no group, since a drawn call could be right otherwise."""
    handler, without = begun_handler(), dict.fromkeys(("rank", "group", "holder"))
    header, before = {**VALID[name].header, **without, "arrays": arrays}, state(handler)
    text = json.dumps(header).encode()
    for message in (decoded(frames), decoded([zlib.crc32(text).to_bytes(CHECK_BYTES, "little") + text, *frames])):
        for _, reply in handler.handle(b"other", message) if message is not None else ():
            assert decoded(reply.encode()) is not None
    assert is_equal(before, state(handler))


def restored(directory):
    """A handler that has read the journal."""
    handler = CallHandler(CallJournal(directory))
    for _ in handler.restore():
        pass
    return handler


def wait_for_copy(handler):
    while handler._journal.is_copying and handler._journal.end_copy() is None:
        time.sleep(0.001)


def run_with_journal(directory, *, waits=False):
    """The calls of a run; after each, and before the first, the state and the files of the journal. `waits`: for the
    copies of the rows."""
    stores = StoreSpec("s", 5, 2, "float64"), StoreSpec("s", 3, 2, "float64")
    spec, rows = OwnedSpec(0, 2, AdaGrad(0.1), GROUPS, stores), torch.arange(5)
    handler, ones = CallHandler(CallJournal(directory)), torch.ones(5, 2).double()
    messages = [calls.open_call(spec), calls.put_call(Place(1, "weight"), rows, (1, 2), ones[:, :1])]
    messages += [
        calls.draw_call(0, rows, rows + 7, 1 << 62, 0.5),
        calls.swap_call([Swap(0, rows[1:3], ones[:2], rows)]),
    ]
    states, contents, pushes = [state(handler)], [{}], make_pushes(spec, 6)
    for round_, rank in ((0, 0), *((i // 2 + 1 - i % 2, i % 2) for i in range(10)), (5, 1)):
        messages.append(numbered(calls.push_call(round_, pushes[round_][rank]), rank))
    swaps = [Swap(1, rows[:2], 3 * ones[:2], rows[:0]), Swap(0, rows[2:4], 2 * ones[:2], rows[:1])]
    messages.insert(9, calls.swap_call(swaps))
    messages = [numbered(message) for message in messages]
    for message in messages:
        states.append(state(send(handler, [message])))
        if waits:
            wait_for_copy(handler)
        contents.append(read_files(directory))
    assert states[-1][0] == 6
    handler.close()
    return messages, states, contents


def test_a_swap_writes_before_it_reads_and_a_kept_store_does_not_change():
    stores = StoreSpec("s", 4, 2, "float64"), StoreSpec("t", 3, 1, "float64")
    handler = send(CallHandler(), [calls.open_call(OwnedSpec(0, 1, SGD(0.1), (), stores))])
    rows, values = torch.arange(4), torch.tensor([[1.0, 2.0], [3.0, 4.0]]).double()
    swaps = [Swap(1, rows[:1], values[:1, :1], rows[:3]), Swap(0, rows[2:], values, rows[[3, 0, 2]])]
    assert ask(handler, calls.swap_call(swaps))["values"] == [
        [[1.0], [0.0], [0.0]],
        [[3.0, 4.0], [0.0, 0.0], [1.0, 2.0]],
    ]
    kept = Message({"call": "read_kept", "store": 0, "snapshot": "a", "first": 1, "num": 3})
    assert "the snapshot of the rows is gone" in ask(handler, kept)["error"]
    keep = Message({"call": "keep", "store": 0, "snapshot": "a"})
    send(handler, [keep, calls.swap_call([Swap(0, rows[:3], torch.cat([values, values[:1]]), rows[:0])]), keep])
    assert ask(handler, kept)["values"] == [[[0.0, 0.0], [1.0, 2.0], [3.0, 4.0]]], "as when it was first kept"
    send(handler, [Message({"call": "drop", "store": 0, "snapshot": "a"})])
    assert "the snapshot of the rows is gone" in ask(handler, kept)["error"]


@pytest.mark.parametrize("restarts", (False, True))
@pytest.mark.parametrize("copies", (False, True))
def test_changes_that_come_again_after_later_ones_change_nothing(tmp_path, monkeypatch, restarts, copies):
    """As from a connection that the rank has lost, whose bytes arrive after those of the next one."""
    monkeypatch.setattr(call_handler, "MIN_COPIED_BYTES", 0 if copies else 1 << 30)
    rows, values = torch.arange(2), torch.ones(2, 4).double()
    put = calls.put_call(Place(0, "weight"), rows, (0, 2), values[:, :2])
    calls_of_step = [put, calls.draw_call(0, rows, rows, 1, 1.0), calls.swap_call([Swap(0, rows, values, rows)])]
    earlier = [numbered(each) for each in calls_of_step]
    handler = send(CallHandler(CallJournal(tmp_path / "a")), [calls.open_call(ONE_RANK), *earlier])
    later = [calls.push_call(0, make_pushes(ONE_RANK, 1)[0][0]), calls.swap_call([Swap(0, rows, 2 * values, rows)])]
    before = state(send(handler, later))
    if restarts:
        wait_for_copy(handler)
        assert (tmp_path / "a" / "1.copy").exists() != copies
        handler.close()
        handler = restored(tmp_path / "a")
    assert is_equal(state(send(handler, earlier)), before)
    assert ask(handler, earlier[-1])["values"] == [(2 * values[:2]).tolist()], "what is there now"
    other = {**put.header, "connection": "state", "number": 1}
    assert not is_equal(state(send(handler, [Message(other, put.arrays)])), before), "connections count by themselves"


def test_updates_in_parts_are_as_those_in_one_message(tmp_path, monkeypatch):
    """In any order, each twice, and with a restart between them."""
    monkeypatch.setattr(calls, "PUSHED_BYTES", 100)
    spec, pushes = OwnedSpec(0, 2, AdaGrad(0.1), GROUPS), make_pushes(OwnedSpec(0, 2, AdaGrad(0.1), GROUPS), 2)
    handler, expected = send(CallHandler(CallJournal(tmp_path)), [calls.open_call(spec)]), OwnedRows(spec)
    parts = {rank: [numbered(m, rank) for m in calls.push_calls(0, pushes[0][rank])] for rank in (0, 1)}
    assert min(map(len, parts.values())) > 3
    for rank in (0, 1):
        expected.push(rank, 0, pushes[0][rank])
    send(handler, [*reversed(parts[0]), *parts[0], parts[1][-1]])
    assert handler._owned.round == 0 and handler._owned.has_incomplete_round
    other = calls.push_call(0, pushes[0][1])
    assert "are in 1 parts, and were in others" in ask(handler, numbered(other, 1))["error"]
    handler.close()
    handler = send(restored(tmp_path), [*parts[1], *parts[1], *parts[0]])
    assert handler._owned.round == 1 and not handler._owned.has_incomplete_round
    assert all(map(torch.equal, handler._owned.all_parts(), expected.all_parts())), "to the bit"
    empty = [replace(pushes[1][0], updates=tuple(each.part(0, 1 << 20) for each in pushes[1][0].updates))]
    assert len([*calls.push_calls(1, empty[0])]) == 1


def test_repeated_calls_are_no_progress():
    """Else a rank whose replies do not arrive would wait, and let others wait, for ever."""
    handler = send(CallHandler(), [calls.open_call(ONE_RANK)])
    push, ping = (
        numbered(calls.push_call(0, make_pushes(ONE_RANK, 1)[0][0])),
        Message({"call": "ping", "without_reply": []}),
    )
    nums = [ask(handler, ping)["num_calls"]]
    for _ in range(3):
        send(handler, [push])
        nums.append(ask(handler, ping)["num_calls"])
    assert nums == [0, 1, 1, 1]


def test_a_server_killed_while_it_removes_its_journal_starts_again(tmp_path, monkeypatch):
    monkeypatch.setattr(call_handler, "MIN_COPIED_BYTES", 0)
    with monkeypatch.context() as patch:
        patch.setattr(CallJournal, "end_copy", lambda _: None)  # what it replaces stays
        _, _, contents = run_with_journal(tmp_path / "whole")
    several = [files for files in contents if {"1.copy", "1.calls", "2.calls"} <= set(files)]
    assert several
    unlink = Path.unlink
    for number, (files, num_left) in enumerate(product(several[::5], range(1, 5))):
        directory = tmp_path / str(number)
        handler, left = start_again(directory, files), count(1)

        def unlink_some(path, left=left, num_left=num_left, **options):
            if next(left) > num_left:
                raise KeyboardInterrupt
            unlink(path, **options)

        with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
            patch.setattr(Path, "unlink", unlink_some)
            handler._journal.remove()
        handler.close()
        restored(directory).close()


def test_a_change_that_fails_is_made_when_it_comes_again(monkeypatch):
    handler = send(CallHandler(), [calls.open_call(ONE_RANK)])
    rows, values = torch.arange(2), torch.ones(2, 4).double()
    swap = numbered(calls.swap_call([Swap(0, rows, values, rows)]))
    write = ShardStores.write
    monkeypatch.setattr(ShardStores, "write", mock.Mock(side_effect=MemoryError("no memory")))
    assert ask(handler, swap)["error"] == "no memory"
    monkeypatch.setattr(ShardStores, "write", write)
    assert ask(handler, swap)["values"] == [values.tolist()]


def test_a_call_about_state_that_comes_after_a_later_one_is_dropped():
    """Its connection is lost: nobody would release the rows that it keeps."""
    handler, rows = send(CallHandler(), [calls.open_call(ONE_RANK)]), torch.arange(1)

    def call(number, **header):
        message = numbered(Message({"store": 0, "snapshot": "a", **header, "connection": "state"}), number=number)
        return handler.handle(b"rank", decoded(message.encode()))

    assert call(1, call="keep") and call(1, call="keep") and call(2, call="drop")
    assert not call(1, call="keep") and not handler._owned.stores.snapshots
    send(handler, [numbered(calls.swap_call([Swap(0, rows, torch.ones(1, 4).double(), rows)]), number=1)])


def test_runs_that_do_not_fit_are_refused_and_the_server_stays():
    stores = (StoreSpec("s", 1 << 60, 1 << 16, "float64"), StoreSpec("s", 1 << 50, 1, "float64"))
    handler = CallHandler()
    for store in stores:
        spec = OwnedSpec(0, 1, SGD(0.1), (), (store,))
        assert "no memory for the rows of this run on the table server" in ask(handler, calls.open_call(spec))["error"]
    group = GroupSpec("a", 5, 2, "bfloat16", 0)
    opened = ask(handler, calls.open_call(OwnedSpec(0, 1, SGD(0.1), (group,))))
    assert opened["error"] == "a group with an impossible type"
    send(handler, [calls.open_call(ONE_RANK)])


def read_files(directory):
    paths = [path for path in directory.iterdir() if path.name != "lock"]
    return {path.name: path.read_bytes() for path in paths if path.exists()}  # a draft may become a copy


def start_again(directory, files):
    """A handler that reads a journal with these files."""
    directory.mkdir()
    for name, content in files.items():
        (directory / name).write_bytes(content)
    return restored(directory)


def assert_continues(handler, messages, states, num):
    """The handler is as after so many messages; pushes that come again have no effect."""
    pushes = [message for message in messages[:num] if message.header["call"] == "push"]
    assert is_equal(state(handler), states[num]) and is_equal(state(send(handler, pushes)), states[num])
    assert is_equal(state(send(handler, messages[num:])), states[-1])


def test_a_journal_that_was_cut_off_has_the_complete_records(tmp_path):
    messages, states, contents = run_with_journal(tmp_path)
    ends = [len(files["1.calls"]) for files in contents[1:]]
    calls = contents[-1]["1.calls"]
    cuts = random.Random(0).sample(range(ends[-1]), 30)
    for cut in {*cuts, *ends, *(end - 1 for end in ends[1:]), *(end + 9 for end in ends[:-1])}:
        restarted = start_again(tmp_path / str(cut), contents[-1] | {"1.calls": calls[:cut]})
        assert_continues(restarted, messages, states, sum(end <= cut for end in ends))
        assert read_files(tmp_path / str(cut)) == contents[-1], "without what was cut off"


# A record is the number of frames, their lengths, each with a check, then a header, then arrays.
@pytest.mark.parametrize("part", ("number of frames", "length", "check", "round", "sign", "value"))
def test_a_damaged_record_is_an_error(tmp_path, part):
    messages, _, contents = run_with_journal(tmp_path)
    content, begin, end = bytearray(contents[-1]["1.calls"]), *(len(contents[i]["1.calls"]) for i in (6, 7))
    head = begin + 8 * (2 + len(messages[6].encode()))
    round_ = content.index(b'"round": ', head) + len(b'"round": ')
    flips = {"number of frames": (begin + 1, 128), "length": (begin + 12, 1), "check": (head - 4, 1)}
    position, bits = (flips | {"round": (round_, 1), "sign": (end - 1, 128), "value": (end - 5, 255)})[part]
    content[position] ^= bits
    with pytest.raises(UserError, match=str(tmp_path / "again" / "1.calls")):
        start_again(tmp_path / "again", contents[-1] | {"1.calls": content})


@pytest.mark.parametrize("waits", (False, True))
def test_a_journal_whose_calls_were_replaced_by_the_rows_has_the_same_state(tmp_path, monkeypatch, waits):
    """Also if the server is killed while a copy is written."""
    monkeypatch.setattr(call_handler, "MIN_COPIED_BYTES", 0)
    monkeypatch.setattr(call_handler, "COPIED_BYTES", 100)  # several records of a part
    messages, states, contents = run_with_journal(tmp_path / "first", waits=waits)
    for number, files in enumerate(contents):
        assert_continues(start_again(tmp_path / str(number), files), messages, states, number)
    if waits:
        assert b'"call": "rows"' in contents[-1][f"{max(int(name.split('.')[0]) for name in contents[-1])}.copy"]


def test_a_copy_that_is_not_whole_is_an_error(tmp_path):
    _, _, contents = run_with_journal(tmp_path)
    with pytest.raises(UserError, match=f"{tmp_path / 'again' / '1.copy'}: a record differs"):
        start_again(tmp_path / "again", contents[-1] | {"1.copy": contents[-1]["1.copy"][:-1]})


def test_calls_are_kept_if_no_copy_of_the_rows_can_be_written(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(call_handler, "MIN_COPIED_BYTES", 0)
    write = CallJournal._write_copy

    def write_copy(self, number, records):
        if number > 1:
            next(records)
            raise OSError(errno.ENOSPC, "No space left on device")
        write(self, number, records)

    monkeypatch.setattr(CallJournal, "_write_copy", write_copy)
    messages, states, contents = run_with_journal(tmp_path / "first", waits=True)
    assert {"1.copy", "1.calls", "2.calls"} <= set(contents[-1]), "2 follows 1"
    assert "no copy of the rows was written: No space left on device; calls are kept" in capfd.readouterr().err
    assert_continues(start_again(tmp_path / "again", contents[-1]), messages, states, len(messages))


def test_a_snapshot_does_not_change_and_is_kept_until_all_have_released_it():
    spec, rows = OwnedSpec(0, 1, Adam(0.1), GROUPS), torch.arange(5)
    pushes = [calls.push_call(round_, by_rank[0]) for round_, by_rank in enumerate(make_pushes(spec, 3))]
    handler = send(CallHandler(), [calls.open_call(spec), pushes[0]])

    def parts(snapshot=None):
        places = (Place(index, part, snapshot) for index in (0, 1) for part in ("weight", "mean", "square"))
        return [ask(handler, calls.get_call(place, rows))["values"] for place in places]

    before = parts()
    snapshot, second = (ask(handler, Message({"call": "snapshot", "holder": each}))["snapshot"] for each in "ab")
    assert snapshot == second, "no copy for the second holder"
    for push, holder in zip(pushes[1:], "ab", strict=True):
        send(handler, [push])
        assert parts(snapshot) == before and all(now != then for now, then in zip(parts(), before, strict=True))
        assert ask(handler, Message({"call": "snapshot", "holder": "c"}))["snapshot"] != snapshot
        send(handler, [Message({"call": "release", "holder": holder, "snapshot": snapshot})] * 2)
    assert "snapshot of the rows is gone" in ask(handler, calls.get_call(Place(0, "weight", snapshot), rows))["error"]


def test_another_run_waits_until_all_ranks_have_disconnected():
    connected, open_call = {b"first", b"second"}, calls.open_call(OwnedSpec(0, 2, SGD(0.1), GROUPS))
    handler, get = CallHandler(is_connected=connected.__contains__), calls.get_call(Place(0, "weight"), torch.arange(2))
    assert all("error" not in ask(handler, open_call, client) for client in sorted(connected))
    for num_connected in (2, 1):
        assert f" {num_connected} of its ranks are connected" in ask(handler, open_call, b"other", "other")["error"]
        connected.pop()
    assert "error" not in ask(handler, get) and "error" not in ask(handler, open_call, b"other", "other")
    assert ask(handler, get)["error"] == LOST and "error" not in ask(handler, get, b"other", "other")


@contextmanager
def connection(address, key_file=""):
    connector = ServerConnector(TableServers((address,), key_file, timeout_seconds=1.2), Caller("r", 0))
    yield connector.connect(0)
    connector.close()


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "name, message",
    (
        ("read", "the updates of other ranks did not arrive in time"),
        ("swap", 'no reply to "swap" for 0.6 s, though it answers other messages'),
    ),
)
def test_a_wait_for_a_server_that_answers_only_pings_says_what_is_missing(name, message):
    """Only a read waits for other ranks; rows that a rank owns do not."""
    context, is_done = zmq.Context(), threading.Event()
    server = context.socket(zmq.ROUTER)
    address = f"tcp://127.0.0.1:{server.bind_to_random_port('tcp://127.0.0.1')}"

    def answer_pings():
        while not is_done.is_set():
            if server.poll(50):
                client, *frames = server.recv_multipart(copy=False)
                header = decode_message(frames).header
                if header["call"] == "ping":
                    server.send_multipart([client, *Message({"number": header["number"]}).encode()])

    thread = threading.Thread(target=answer_pings)
    thread.start()
    connector = ServerConnector(TableServers((address,), timeout_seconds=0.6), Caller("r", 0))
    try:
        with (
            mock.patch("shardwright.comm.transport.servers.PING_SECONDS", 0.1),
            pytest.raises(UserError, match=message),
        ):
            connector.connect(0).call(Message({"call": name})).wait()
    finally:
        is_done.set()
        thread.join()
        connector.close()
        context.destroy(linger=0)


@contextmanager
def serving(monkeypatch, **options):
    """A table server in a thread."""
    server, stopped = TableServer(**options), threading.Event()
    monkeypatch.setattr(server, "_log", lambda write_line: stopped.is_set() and sys.exit())
    thread = threading.Thread(target=server.run, args=(print,), daemon=True)
    thread.start()
    try:
        yield server
        assert thread.is_alive(), "no message ends a server"
    finally:
        stopped.set()
        thread.join()
        server.close()


@pytest.mark.timeout(20)
@pytest.mark.filterwarnings("ignore:Exception in thread")  # it ends the server
def test_after_a_call_that_was_refused_others_go_on(monkeypatch):
    """It is not repeated: its error would be that of a later call."""
    monkeypatch.setattr("shardwright.comm.transport.servers.PING_SECONDS", 0.05)
    with serving(monkeypatch) as server, connection(server.address) as rank:
        rank.call(calls.open_call(ONE_RANK)).wait()
        with pytest.raises(UserError, match="the snapshot of the rows is gone"):
            rank.call(Message({"call": "read_kept", "store": 0, "snapshot": "a", "first": 0, "num": 1})).wait()
        read = rank.call(calls.read_call(1, [GroupRead(torch.arange(1), torch.tensor([-1]))] * len(ONE_RANK.groups)))
        with pytest.raises(UserError, match="the updates of other ranks did not arrive in time"):
            read.wait()  # it sends pings
        rank.call(calls.push_call(0, make_pushes(ONE_RANK, 1)[0][0])).wait()
        refused = rank.call(calls.push_call(9, make_pushes(ONE_RANK, 1)[0][0]))
        with pytest.raises(UserError, match="for round 9, while round 1 is not complete"):
            rank.call(calls.get_call(Place(0, "weight"), torch.arange(2))).wait()
        with pytest.raises(UserError, match="for round 9, while round 1 is not complete"):
            refused.wait()


@pytest.mark.timeout(20)
@pytest.mark.filterwarnings("ignore:Exception in thread")  # it ends the server
def test_ranks_wait_for_updates_that_arrive_in_many_parts(monkeypatch):
    """Longer than the timeout, as long as the server says that it gets more of them."""
    monkeypatch.setattr("shardwright.comm.transport.servers.PING_SECONDS", 0.1)
    monkeypatch.setattr(calls, "PUSHED_BYTES", 20)
    spec = OwnedSpec(0, 2, SGD(0.1), GROUPS)
    pushes = make_pushes(spec, 1)[0]
    with serving(monkeypatch) as server:
        address = TableServers((server.address,), timeout_seconds=2)
        connectors = [ServerConnector(address, Caller("r", rank)) for rank in (0, 1)]
        first, second = (each.connect(0) for each in connectors)
        for rank in (first, second):
            rank.call(calls.open_call(spec)).wait()
        parts, pushed = [*calls.push_calls(0, pushes[1])], threading.Event()
        assert len(parts) > 10
        first.call(calls.push_call(0, pushes[0])).wait()
        read = first.call(calls.read_call(1, [GroupRead(torch.arange(2), torch.tensor([-1, -1]))] * 2))

        def push_slowly():
            for part in parts:
                time.sleep(0.3)
                second.call(part).wait()
            pushed.set()

        thread, start = threading.Thread(target=push_slowly), time.monotonic()
        thread.start()
        assert len(read.wait().arrays) == 4 and time.monotonic() - start > 2
        thread.join()
        assert pushed.is_set()
        for connector in connectors:
            connector.close()


@pytest.mark.timeout(20)
@pytest.mark.filterwarnings("ignore:Exception in thread")  # it ends the server
def test_the_end_of_a_job_ends_waits_of_other_threads(monkeypatch):
    spec, errors = OwnedSpec(0, 2, SGD(0.1), GROUPS), []
    with serving(monkeypatch) as server:
        connector = ServerConnector(TableServers((server.address,)), Caller("r", 0))
        rank = connector.connect(0)
        rank.call(calls.open_call(spec)).wait()
        none = torch.empty(0, dtype=torch.int64)
        read = rank.call(calls.read_call(1, [GroupRead(none, none)] * 2))  # of a round that no rank completes

        def wait():
            try:
                read.wait()
            except UserError as error:
                errors.append(str(error))

        thread = threading.Thread(target=wait)
        thread.start()
        time.sleep(0.2)
        start = time.monotonic()
        connector.close()
        thread.join()
        assert time.monotonic() - start < 5 and "this job has ended" in errors[0]


@pytest.mark.timeout(20)
@pytest.mark.filterwarnings("ignore:Exception in thread")  # it ends the server
def test_a_server_that_reads_its_journal_for_long_is_waited_for(tmp_path, monkeypatch):
    messages = [
        calls.open_call(ONE_RANK),
        *(calls.push_call(i, push) for i, (push,) in enumerate(make_pushes(ONE_RANK, 30))),
    ]
    earlier = [numbered(message, number=number) for number, message in enumerate(messages[:-1], start=1)]
    handler = send(CallHandler(CallJournal(tmp_path)), earlier)
    expected = state(handler)
    handler.close()
    restore = CallHandler.restore

    def restore_slowly(self):
        for each in restore(self):
            time.sleep(0.1)  # 3 s, twice the timeout
            yield each

    monkeypatch.setattr(CallHandler, "restore", restore_slowly)
    monkeypatch.setattr("shardwright.comm.transport.servers.PING_SECONDS", 0.2)
    server, stopped = TableServer(journal=tmp_path), threading.Event()
    monkeypatch.setattr(server, "_log", lambda write_line: stopped.is_set() and sys.exit())
    thread = threading.Thread(target=server.run, args=(print,), daemon=True)
    thread.start()
    with connection(server.address) as rank:
        (rows,) = rank.call(calls.get_call(Place(0, "weight"), torch.arange(6))).wait().arrays
        assert torch.equal(torch.from_numpy(rows), expected[1])
    stopped.set()
    thread.join()
    server.close()


@pytest.mark.timeout(20)
@pytest.mark.filterwarnings("ignore:Exception in thread")  # it ends the server
@pytest.mark.parametrize("has_keys", (False, True))
def test_garbage_and_clients_without_keys_disturb_no_other(tmp_path, monkeypatch, has_keys):
    with pytest.raises(UserError, match="no keys are set; .*serve-tables --new-keys DIR.*, then serve with --keys"):
        TableServer("tcp://0.0.0.0:0")
    files = [str(path) for path in create_key_files(tmp_path / "keys", "server")] if has_keys else ["", ""]
    server, stopped, generator = TableServer(keys=load_keys(files[0], "server")), threading.Event(), random.Random(0)
    monkeypatch.setattr(server, "_log", lambda write_line: stopped.is_set() and sys.exit())
    thread, expected = threading.Thread(target=server.run, args=(print,), daemon=True), OwnedRows(ONE_RANK)
    thread.start()
    with connection(server.address, files[1]) as rank, zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        secure_socket(dealer, load_keys(files[1], "trainer"))
        dealer.linger = 0
        dealer.connect(server.address)
        rank.call(calls.open_call(ONE_RANK)).wait()
        for round_, (push,) in enumerate(make_pushes(ONE_RANK, 30)):
            frames = [generator.randbytes(generator.randrange(200)) for _ in range(generator.randrange(1, 5))]
            dealer.send_multipart(frames if round_ % 3 else Message({"call": "open"}).encode())
            rank.call(calls.push_call(round_, push)).wait()
            expected.push(0, round_, push)
        (rows,) = rank.call(calls.get_call(Place(0, "weight"), torch.arange(6))).wait().arrays
        assert torch.equal(torch.from_numpy(rows), expected.parts(0)["weight"])
        assert not dealer.poll(200) and server._handler.served.malformed == 30
        if has_keys:
            with connection(server.address) as other, pytest.raises(UserError, match=f"{server.address}: no reply for"):
                other.call(Message({"call": "snapshot", "holder": "h"})).wait()
            assert not server._handler._owned._snapshots
    assert thread.is_alive(), "no message ends a server"
    stopped.set()
    thread.join()
    server.close()


class CyclicClient:
    """Holds a socket in a cycle, as the traceback of an error does."""

    def __init__(self) -> None:
        self.itself, self.context = self, KeptContext()
        self.socket = connect_dealer(self.context.context, "tcp://127.0.0.1:1", None, "table server")
        self.socket.send(b"to nobody")  # queued: nothing listens there


def test_connections_that_nobody_closed_do_not_block_garbage_collection():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()
        gc.freeze()  # objects of other tests, which take a second to look at on a busy machine
        try:
            start = time.monotonic()
            for _ in range(5):
                CyclicClient()
                gc.collect()
            assert time.monotonic() - start < 5
        finally:
            gc.unfreeze()
