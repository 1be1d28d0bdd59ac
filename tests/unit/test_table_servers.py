"""Table servers without processes: messages that are late, lost, repeated, damaged or wrong, journals, and sockets."""

import json
import random
import shutil
import sys
import threading
from collections import Counter
from contextlib import contextmanager
from itertools import permutations, product

import numpy as np
import pytest
import torch
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.comm.transport.arrays import Message, decode_message
from shardwright.comm.transport.keys import create_key_files, load_keys
from shardwright.comm.transport.servers import Caller, ServerConnector, TableServers
from shardwright.embeddings.copies.updates import RowUpdates, squares_of
from shardwright.embeddings.service import call_handler, calls
from shardwright.embeddings.service.call_handler import LOST, CallHandler
from shardwright.embeddings.service.journal import CallJournal
from shardwright.embeddings.service.owned_rows import MAX_ROUNDS_AHEAD as AHEAD
from shardwright.embeddings.service.owned_rows import GroupRead, GroupSpec, OwnedRows, OwnedSpec, Place, Push
from shardwright.embeddings.service.server import TableServer
from shardwright.errors import UserError
from shardwright.spec.optimizer import SGD, AdaGrad, Adam

GROUPS = (GroupSpec("a, b", 12, 3, "float64", 0), GroupSpec("c", 5, 2, "float64", 0))
TORCH = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "adam": torch.optim.Adam}


def make_pushes(spec, num_rounds, seed):
    """By round and rank. With Adam, rank 0 updates all rows, since torch's dense step does so."""
    generator, pushes = torch.Generator().manual_seed(seed), []
    for round_, rank in product(range(num_rounds), range(spec.num_ranks)):
        updates = []
        for group in spec.groups:
            num = int(torch.randint(0, group.rows + 1, (), generator=generator))
            num = group.rows if rank == 0 and isinstance(spec.optimizer, Adam) else num
            rows = torch.randperm(group.rows, generator=generator)[:num]
            sums = torch.randn(num, group.dim, dtype=torch.float64, generator=generator)
            updates.append(RowUpdates(rows, torch.ones_like(rows), sums, squares_of(spec.optimizer, sums)))
        pushes += [[]] if rank == 0 else []
        pushes[-1].append(Push(spec.optimizer, (round_ + 1,) * len(spec.groups), tuple(updates)))
    return pushes


def initial_rows(group):
    return torch.linspace(-1, 1, group.rows * group.dim, dtype=torch.float64).view(group.rows, group.dim)


def decoded(frames):
    return decode_message([zmq.Frame(bytes(frame)) for frame in frames])


def numbered(message, rank=0, number=1, run="r"):
    return Message({"run": run, "rank": rank, "server": 0, "number": number, **message.header}, message.arrays)


def ask(handler, message, client=b"rank", run="r"):
    """The header of the reply, with its arrays."""
    ((receiver, reply),) = handler.handle(client, decoded(numbered(message, run=run).encode()))
    assert receiver == client
    reply = decoded(reply.encode())
    return {**reply.header, "values": [array.tolist() for array in reply.arrays]}


def state(handler):
    """The round, and copies of all rows, their optimizer state and versions."""
    owned = handler._owned
    return (-1, []) if owned is None else (owned.round, [part.clone() for part in owned.all_parts()])


def is_equal(first, second):
    return first[0] == second[0] and len(first[1]) == len(second[1]) and all(map(torch.equal, first[1], second[1]))


@settings(max_examples=60)
@given(st.sampled_from((SGD(0.1), AdaGrad(0.1), Adam(0.1))), st.integers(1, 4), st.integers(1, 5), st.data())
def test_rows_do_not_depend_on_the_order_of_arrival_and_equal_torch(optimizer, num_ranks, num_rounds, data):
    spec = OwnedSpec(0, num_ranks, optimizer, GROUPS)
    pushes = make_pushes(spec, num_rounds, data.draw(st.integers(0, 2**31)))
    in_order, drawn = OwnedRows(spec), OwnedRows(spec)
    for owned, (index, group) in product((in_order, drawn), enumerate(GROUPS)):
        owned.put(Place(index, "weight"), torch.arange(group.rows), (0, group.dim), initial_rows(group))
    for (round_, by_rank), rank in product(enumerate(pushes), range(num_ranks)):
        assert in_order.push(rank, round_, by_rank[rank])
    rounds = [0] * num_ranks
    while ready := [rank for rank in range(num_ranks) if rounds[rank] < min(num_rounds, drawn.round + AHEAD)]:
        rank = data.draw(st.sampled_from(ready))
        assert drawn.push(rank, rounds[rank], pushes[rounds[rank]][rank])
        rounds[rank] += 1
    assert drawn.round == in_order.round == num_rounds
    assert all(map(torch.equal, drawn.all_parts(), in_order.all_parts())), "to the bit"
    for index, group in enumerate(GROUPS):
        weight, versions = torch.nn.Parameter(initial_rows(group)), torch.zeros(group.rows, dtype=torch.int64)
        dense = TORCH[optimizer.kind]([weight], lr=optimizer.lr)
        for by_rank in pushes:
            weight.grad = torch.zeros_like(weight)
            for updates in (push.updates[index] for push in by_rank):
                weight.grad.index_add_(0, updates.rows_V, updates.sums_VD)
                versions[updates.rows_V] += 1
            dense.step()
        torch.testing.assert_close(drawn.parts(index)["weight"], weight.data, rtol=0, atol=1e-10)
        assert torch.equal(drawn.clocks[index].version_E, versions)


def test_sums_are_added_in_the_order_of_ranks():
    """1 is lost beside 1e16, so that the sum depends on the order."""
    for order in permutations(range(3)):
        owned = OwnedRows(OwnedSpec(0, 3, SGD(1.0), (GroupSpec("t", 1, 1, "float64", 0),)))
        for rank in order:
            row, sums = torch.tensor([0]), torch.tensor([[(1e16, 1.0, -1e16)[rank]]], dtype=torch.float64)
            owned.push(rank, 0, Push(SGD(1.0), (1,), (RowUpdates(row, row + 1, sums, sums[:, :0]),)))
        assert owned.round == 1 and owned.parts(0)["weight"].item() == 0.0


class Twin:
    """Ranks and a handler; the network between them loses, repeats, reorders and damages messages."""

    def __init__(self, spec, pushes, seed, fault_rate):
        self.spec, self.pushes, self.handler, self.fault_rate = spec, pushes, CallHandler(), fault_rate
        self.random, self.fired, self.values = random.Random(seed), Counter(), {}
        self.in_flight, self.delivered = [], []  # is a call, rank, frames
        self.unanswered, self.replies = ([{} for _ in range(spec.num_ranks)] for _ in range(2))  # by number

    def run(self):
        programs = [self.train(rank) for rank in range(self.spec.num_ranks)]
        waited = [next(program) for program in programs]
        while any(waited):
            for rank, program in enumerate(programs):
                if waited[rank] and waited[rank] <= self.replies[rank].keys():
                    waited[rank] = next(program, set())
            self.move() if self.in_flight else self.repeat()
        return self

    def train(self, rank):
        """Yields the numbers of the calls whose replies it waits for."""
        pending = {self.call(rank, calls.open_call(self.spec))}
        reads = [GroupRead(torch.arange(group.rows), torch.full((group.rows,), -1)) for group in self.spec.groups]
        yield pending
        for round_, by_rank in enumerate(self.pushes):
            number = self.call(rank, calls.read_call(round_, reads))
            yield pending | {number}
            self.values[rank, round_] = [array.tolist() for array in self.replies[rank][number].arrays]
            pending = {self.call(rank, calls.push_call(round_, by_rank[rank]))}
        yield pending

    def call(self, rank, message):
        number = len(self.replies[rank]) + len(self.unanswered[rank]) + 1
        self.unanswered[rank][number] = numbered(message, rank, number)
        self.in_flight.append((True, rank, self.unanswered[rank][number].encode()))
        return number

    def repeat(self):
        """Call again what the handler does not have: all, if it has not received an `open`."""
        for rank, unanswered in enumerate(self.unanswered):
            ping = numbered(Message({"call": "ping", "without_reply": [*unanswered]}), rank, 0)
            ((_, reply),) = self.handler.handle(bytes([rank]), ping)
            for number in reply.header.get("missing", unanswered):
                self.fired["called again"] += 1
                self.in_flight.append((True, rank, unanswered[number].encode()))

    def move(self):
        """Deliver one message, or not."""
        index = self.random.randrange(len(self.in_flight)) if self.fault_rate else 0
        is_call, rank, frames = moved = self.in_flight.pop(index)
        fault = self.random.choice(("lost", "damaged", "repeated")) if self.random.random() < self.fault_rate else ""
        self.fired.update([fault, "reordered"] if index else [fault])
        if fault == "damaged":
            assert decoded(self.damage(frames)) is None
        elif fault != "lost":
            self.delivered.append(moved)
            self.in_flight += [moved, self.random.choice(self.delivered)] if fault == "repeated" else []
            (self.receive_call if is_call else self.receive_reply)(rank, decoded(frames))

    def damage(self, frames):
        frames = [bytearray(frame) for frame in frames]
        number = self.random.choice([number for number, frame in enumerate(frames) if frame])
        if number == 0:
            return [frames[0][: self.random.randrange(len(frames[0]))], *frames[1:]]
        frames[number][self.random.randrange(len(frames[number]))] ^= 255
        return frames

    def receive_call(self, rank, message):
        call, round_ = message.header["call"], message.header.get("round")
        self.fired["push of an old round"] += call == "push" and round_ < self.handler._owned.round
        replies = self.handler.handle(bytes([rank]), message)
        self.fired["read before its round"] += call == "read" and not replies
        for client, reply in replies:
            assert "error" not in reply.header
            self.in_flight.append((False, client[0], reply.encode()))

    def receive_reply(self, rank, reply):
        number = reply.header["number"]
        if self.unanswered[rank].pop(number, None) is None:
            self.fired["second reply"] += 1
        else:
            self.replies[rank][number] = reply


def test_messages_that_are_late_lost_repeated_or_damaged_change_nothing():
    fired, spec = Counter(), OwnedSpec(0, 3, AdaGrad(0.1), GROUPS)
    for seed in range(20):
        pushes = make_pushes(spec, 5, seed)
        expected, twin = (Twin(spec, pushes, seed, fault_rate).run() for fault_rate in (0.0, 0.5))
        assert is_equal(state(twin.handler), state(expected.handler)) and twin.handler._owned.round == 5
        assert twin.values == expected.values, "reads are exact"
        fired += twin.fired
    kinds = ("lost", "damaged", "repeated", "reordered", "called again", "second reply")
    assert min(fired[kind] for kind in (*kinds, "push of an old round", "read before its round")) > 20


def test_each_flipped_bit_of_an_array_is_noticed():
    frames = [bytes(frame) for frame in Message({}, [np.linspace(1, 2, 4), np.arange(3, dtype=np.int32)]).encode()]
    unnoticed = []
    for position, bit in [*product([1], range(8 * len(frames[1]))), *product([2], range(8 * len(frames[2])))]:
        changed = [bytearray(frame) for frame in frames]
        changed[position][bit // 8] ^= 1 << bit % 8
        unnoticed += [] if decoded(changed) is None else [(position, bit)]
    assert not unnoticed, "(number of the array, bit)"


@pytest.mark.parametrize("array", (np.arange(9.0)[::2], np.arange(6).reshape(2, 3).T, np.array(1.5), np.ones((0, 4))))
def test_arrays_with_gaps_are_sent_like_others(array):
    received = decoded(Message({"a": 1}, [array]).encode())
    assert received.header == {"a": 1} and received.arrays[0].dtype == array.dtype
    assert received.arrays[0].shape == array.shape and received.arrays[0].tolist() == array.tolist()


# Messages that no rank sends

ONE_RANK = OwnedSpec(0, 1, AdaGrad(0.1), (GroupSpec("t", 6, 2, "float64", 0),))
ROUND = SNAPSHOT = 1  # after one push
ROWS, ONES, VALUES = np.array([1, 2], np.int32), np.ones(2, np.int32), np.ones((2, 4))
PLACE = {"group": 0, "part": "weight"}
VALID = {
    "read": Message({"round": ROUND}, [ROWS, -ONES]),
    "push": Message({"round": ROUND, "steps": [1], "lr": 0.1}, [ROWS, ONES, VALUES]),
    "put": Message({"columns": [0, 2], **PLACE}, [ROWS, VALUES[:, :2]]),
    "get": Message({"snapshot": SNAPSHOT, **PLACE}, [ROWS]),
    "snapshot": Message({"holder": "other"}),
    "release": Message({"holder": "holder", "snapshot": SNAPSHOT}),
    "ping": Message({"without_reply": [1]}),
    "close": Message({}),
    "open": calls.open_call(ONE_RANK),
}
NO_INTEGER = [..., None, "0", 1.5, True, [], [[0]], {}, 10**30, -(10**30)]  # ...: without the field
NO_TEXT, NO_LIST = [..., None, 5, [], {}], [..., None, 1, "1", [1.5], [[1]], {}]
WRONG_FIELDS = {
    "read": {"round": [*NO_INTEGER, 1 << 40], "number": NO_INTEGER, "run": [*NO_TEXT, "other"], "call": NO_TEXT},
    "push": {"round": [*NO_INTEGER, ROUND + AHEAD, 1 << 40], "rank": [*NO_INTEGER, -1, 1]}
    | {"steps": [*NO_LIST, [], [1, 1], [-1], [10**30]], "lr": [None, "0.1", [], 10**400, float("nan"), float("inf")]},
    "put": {"columns": [*NO_LIST, [0], [0, 1, 2], [1, 0], [-1, 1], [0, 3], [0, 10**30], [[0, 2]]]}
    | {"group": [*NO_INTEGER, -1, 1], "part": [*NO_TEXT, "mean"], "snapshot": [*NO_INTEGER[1:], 99, SNAPSHOT]},
    "get": {"group": [*NO_INTEGER, -1, 1], "part": [*NO_TEXT, "mean"], "snapshot": [*NO_INTEGER[1:], 99]}
    | {"call": ["unknown", "rows"]},
    "snapshot": {"holder": NO_TEXT},
    "release": {"holder": NO_TEXT, "snapshot": NO_INTEGER},
    "ping": {"without_reply": NO_LIST},
    "close": {"rank": [*NO_INTEGER, -1, 1]},
    "open": {"version": [..., None, 2, "1"], "spec": [..., None, [], {}, 1], "run": [*NO_TEXT, "other"]},
}
SHAPES = [ROWS.reshape(shape) for shape in ((1, 2), (2, 1), (2, 1, 1))]
NO_WORDS = SHAPES + [ROWS.astype(kind) for kind in ("f8", "?", "u1", "i2", ">i4", ">i8", "g")]
LENGTHS = [ROWS[:1], ROWS[:0], np.arange(3), np.array(1)]
NO_ROWS = NO_WORDS + [np.array([1, row]) for row in (6, -1, 1 << 40, -(1 << 62))]
NO_COUNTS = NO_WORDS + LENGTHS + [np.array([1, count]) for count in (-1, 1 << 40, 1 << 62)]
NO_VERSIONS = NO_WORDS + LENGTHS + [np.array([-1, version]) for version in (-(1 << 40), -(1 << 62))]


def wrong_values(width):
    shapes = ((2 * width,), (2, width - 1), (2, width + 1), (3, width), (2, width, 1), (1, 2, width), (), (2, 0))
    kinds = ("f4", "f2", "i8", "?", ">f8", "g")
    return [np.ones(shape) for shape in shapes] + [np.ones((2, width), kind) for kind in kinds]


WRONG_ARRAYS = {
    "read": (NO_ROWS + LENGTHS, NO_VERSIONS),
    "push": (NO_ROWS + LENGTHS, NO_COUNTS, wrong_values(4)),
    "put": (NO_ROWS + LENGTHS, wrong_values(2)),
    "get": (NO_ROWS,),
}


def begun_handler():
    """A handler after a round, with a snapshot."""
    handler, push = CallHandler(), make_pushes(ONE_RANK, 1, 0)[0][0]
    for message in (calls.open_call(ONE_RANK), calls.push_call(0, push)):
        assert "error" not in ask(handler, message)
    assert ask(handler, Message({"call": "snapshot", "holder": "holder"}))["snapshot"] == SNAPSHOT
    return handler


def valid_call(name):
    return numbered(Message({"call": name, **VALID[name].header}, VALID[name].arrays))


def all_rows(handler):
    """As `state`, with rows of the snapshot."""
    snapshots = handler._owned._snapshots if handler._owned else {}
    round_, parts = state(handler)
    return round_, parts + [part.clone() for each in snapshots.values() for part in each.parts[0].values()]


def fault_of(message):
    """What a handler does wrong with a message that no rank sends; empty: it refuses it."""
    handler = begun_handler()
    before = all_rows(handler)
    try:
        received = decoded(message.encode())
        if received is None:
            return ""  # counted by the server
        replies = handler.handle(b"rank", received)
        assert all(decoded(reply.encode()) is not None for _, reply in replies)
        if not is_equal(before, all_rows(handler)):
            return "changes rows"
        if not handler.served.malformed and not any("error" in reply.header for _, reply in replies):
            return "accepts it"
        handler.handle(b"rank", valid_call("push"))
        return "" if handler._owned.round == ROUND + 1 else "refuses valid calls then"
    except Exception as error:
        return f"raises {type(error).__name__}"


def test_valid_calls_are_answered():
    for name in VALID:
        handler = begun_handler()
        assert "error" not in ask(handler, valid_call(name)) and not handler.served.malformed
        assert is_equal(state(handler), state(begun_handler())) == (name not in ("push", "put", "close"))


@pytest.mark.parametrize("name", WRONG_FIELDS)
def test_messages_with_a_wrong_field_are_refused(name):
    faults, header = {}, valid_call(name).header
    for field, value in ((field, value) for field, values in WRONG_FIELDS[name].items() for value in values):
        changed = {key: each for key, each in {**header, field: value}.items() if each is not ...}
        faults[f"{field} {value!r:.20}"] = fault_of(Message(changed, VALID[name].arrays))
    assert not {message: fault for message, fault in faults.items() if fault}


@pytest.mark.parametrize("name", WRONG_ARRAYS)
def test_messages_with_a_wrong_array_are_refused(name):
    header, arrays = valid_call(name).header, [*VALID[name].arrays]
    wrong = {f"{num} arrays": arrays[:num] for num in range(len(arrays))}
    wrong |= {"one more array": [*arrays, arrays[0]], "all arrays twice": arrays * 2}
    for position, array in ((position, each) for position, part in enumerate(WRONG_ARRAYS[name]) for each in part):
        changed = [*arrays[:position], array, *arrays[position + 1 :]]
        wrong[f"array {position}: {array.dtype.str} {array.shape} {array.ravel()[-1:]}"] = changed
    faults = {message: fault_of(Message(header, changed)) for message, changed in wrong.items()}
    assert not {message: fault for message, fault in faults.items() if fault}


def test_runs_that_cannot_be_are_refused():
    plain, accepted = calls.open_call(ONE_RANK).header["spec"], []
    (group,) = plain["groups"]
    wrong = [{"num_ranks": number} for number in (0, -1, 1 << 70)] + [{"optimizer": {"kind": "sgd"}}]
    for name, value in product(("rows", "dim", "pull"), (-1, 1 << 62, 1 << 70)):
        wrong.append({"groups": [{**group, name: value}]})
    for change in wrong:
        try:
            reply = ask(CallHandler(), Message({"call": "open", "version": 1, "spec": plain | change}))
            accepted += [] if "error" in reply else [change]
        except TypeError as error:
            accepted.append((change, error))
    assert not accepted


@pytest.mark.parametrize(
    "name, field", (("open", "spec"), ("push", "steps"), ("get", "number"), ("ping", "without_reply"))
)
def test_nested_lists_are_refused(name, field):
    """At some depth they can just be decoded; what follows must not need more of the stack."""
    handler, header = begun_handler(), json.dumps({**valid_call(name).header, field: 12345, "arrays": []}).encode()
    before = all_rows(handler)
    for depth in range(700, 1000):
        if (message := decoded([header.replace(b"12345", b"[" * depth + b"]" * depth)])) is not None:
            handler.handle(b"rank", message)
    assert is_equal(before, all_rows(handler))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
TYPES = st.sampled_from(("<i4", "<i8", "<f8", "|b1", ">i4", "O", "(2,)i4", "(,)i4", "i4,(", "M8[ns]")) | JSON
SPEC = st.tuples(TYPES, st.lists(st.integers(-2, 9), max_size=3) | JSON, st.integers(0, 9) | JSON)
FIELDS = dict.fromkeys(("round", "steps", "lr", "columns", "part", "snapshot", "holder", "version", "spec"), JSON)
FIELDS |= {"call": st.sampled_from([*VALID]) | JSON, "run": st.just("r") | JSON, "number": st.integers() | JSON}
FIELDS |= {"rank": st.text(), "group": st.text()}  # never right, so that no call changes rows
HEADERS = st.fixed_dictionaries({"arrays": st.lists(SPEC, max_size=3) | JSON}, optional=FIELDS)


@settings(max_examples=200)
@given(HEADERS.map(lambda header: json.dumps(header).encode()) | st.binary(), st.lists(st.binary(), max_size=3))
def test_garbage_changes_nothing(header, frames):
    handler, message = begun_handler(), decoded([header, *frames])
    before = state(handler)
    for _, reply in handler.handle(b"other", message) if message is not None else ():
        assert decoded(reply.encode()) is not None
    assert is_equal(before, state(handler))


# The journal


def serve(directory, messages=()):
    """A handler with a journal after these calls."""
    handler = CallHandler(CallJournal(directory))
    for message in messages:
        assert not any("error" in reply.header for _, reply in handler.handle(b"rank", decoded(message.encode())))
    return handler


def journaled_calls():
    """All leave a record. Rank 1 is one round behind rank 0."""
    spec = OwnedSpec(0, 2, AdaGrad(0.1), GROUPS)
    messages, pushes = [numbered(calls.open_call(spec))], make_pushes(spec, 6, 0)
    for index, group in enumerate(GROUPS):
        rows = torch.arange(group.rows)
        messages.append(numbered(calls.put_call(Place(index, "weight"), rows, (0, group.dim), initial_rows(group))))
    for round_, rank in ((0, 0), *((i // 2 + 1 - i % 2, i % 2) for i in range(10)), (5, 1)):
        messages.append(numbered(calls.push_call(round_, pushes[round_][rank]), rank))
    return messages


def pushes_of(messages):
    return [message for message in messages if message.header["call"] == "push"]


def send(handler, messages):
    for message in messages:
        assert "error" not in ask(handler, message)


def test_a_journal_that_was_cut_off_has_the_complete_records(tmp_path):
    messages, ends, states, handler = journaled_calls(), [0], [(-1, [])], serve(tmp_path / "whole")
    for message in messages:
        send(handler, [message])
        ends.append((tmp_path / "whole" / "rows.journal").stat().st_size)
        states.append(state(handler))
    assert states[-1][0] == 6 and ends == sorted(set(ends))
    for cut in {
        *ends,
        *(end - 1 for end in ends[1:]),
        *(end + 9 for end in ends[:-1]),
        *random.Random(0).sample(range(ends[-1]), 30),
    }:
        shutil.copytree(tmp_path / "whole", tmp_path / str(cut))
        with (tmp_path / str(cut) / "rows.journal").open("r+b") as file:
            file.truncate(cut)
        num_complete, restarted = sum(end <= cut for end in ends) - 1, serve(tmp_path / str(cut))
        assert is_equal(state(restarted), states[num_complete])
        send(restarted, pushes_of(messages[:num_complete]))
        assert is_equal(state(restarted), states[num_complete]), "pushes that come again have no effect"
        send(restarted, messages[num_complete:])
        assert is_equal(state(restarted), states[-1])
        assert is_equal(state(serve(tmp_path / str(cut))), states[-1]), "the records after the cut are complete"


# A record is its head (the number of frames, their lengths, a checksum), then a header, then arrays.
@pytest.mark.parametrize(
    "part", ("number of frames", "length", "checksum of the head", "round", "sign of a value", "value")
)
def test_a_damaged_record_is_an_error(tmp_path, part):
    messages, path = journaled_calls(), tmp_path / "rows.journal"
    serve(tmp_path, messages[:6])
    begin, frames = path.stat().st_size, messages[6].encode()
    serve(tmp_path, messages[6:7])
    end = path.stat().st_size
    serve(tmp_path, messages[7:])
    head, round_ = begin + 8 * (2 + len(frames)), frames[0].index(b'"round": ') + len('"round": ')
    flips = {"number of frames": (begin, 1), "length": (begin + 8, 1), "checksum of the head": (head - 8, 1)}
    flips |= {"round": (head + round_, 1), "sign of a value": (end - 1, 128), "value": (end - 5, 255)}
    content = bytearray(path.read_bytes())
    content[flips[part][0]] ^= flips[part][1]
    path.write_bytes(content)
    with pytest.raises(UserError, match=str(path)):
        serve(tmp_path)


def test_a_journal_that_was_replaced_by_the_rows_has_the_same_state(tmp_path, monkeypatch):
    monkeypatch.setattr(call_handler, "MIN_COMPACTED_BYTES", 0)
    messages, first_records, handler = journaled_calls(), [], serve(tmp_path)
    for number, message in enumerate(messages, start=1):
        send(handler, [message])
        first_records.append(next(CallJournal(tmp_path).read()).header["call"])
        shutil.copytree(tmp_path, tmp_path / "copy", ignore=lambda *_: ["copy"], dirs_exist_ok=True)
        restarted = serve(tmp_path / "copy")
        assert is_equal(state(restarted), state(handler))
        send(restarted, pushes_of(messages[:number]))
        assert is_equal(state(restarted), state(handler)), "pushes that come again have no effect"
    assert first_records[0] == "open" and "rows" in first_records


# Snapshots and runs


def test_a_snapshot_does_not_change_and_is_kept_until_all_have_released_it():
    handler, spec, rows = CallHandler(), OwnedSpec(0, 1, Adam(0.1), GROUPS), torch.arange(5)
    pushes = [calls.push_call(round_, by_rank[0]) for round_, by_rank in enumerate(make_pushes(spec, 3, 0))]
    send(handler, [calls.open_call(spec), pushes[0]])

    def parts(snapshot=None):
        places = (Place(index, part, snapshot) for index in (0, 1) for part in ("weight", "mean", "square"))
        return [ask(handler, calls.get_call(place, rows))["values"] for place in places]

    before = parts()
    snapshot, second = (ask(handler, Message({"call": "snapshot", "holder": each}))["snapshot"] for each in "ab")
    assert snapshot == second, "no copy for the second holder"
    for push, holder in zip(pushes[1:], "ab", strict=True):
        send(handler, [push])
        assert parts(snapshot) == before and all(now != then for now, then in zip(parts(), before, strict=True))
        later = ask(handler, Message({"call": "snapshot", "holder": "c"}))["snapshot"]
        assert later != snapshot and parts(later) == parts()
        send(handler, [Message({"call": "release", "holder": holder, "snapshot": snapshot})] * 2)
    assert (
        "the snapshot of the rows is gone" in ask(handler, calls.get_call(Place(0, "weight", snapshot), rows))["error"]
    )
    assert parts(later) == parts()


def test_another_run_waits_until_all_ranks_have_disconnected():
    connected = {b"first", b"second"}
    handler, open_call = (
        CallHandler(is_connected=connected.__contains__),
        calls.open_call(OwnedSpec(0, 2, SGD(0.1), GROUPS)),
    )
    get = calls.get_call(Place(0, "weight"), torch.arange(2))
    assert all("error" not in ask(handler, open_call, client) for client in sorted(connected))
    for num_connected in (2, 1):
        error = ask(handler, open_call, b"other", "other")["error"]
        assert f"another run uses this table server: {num_connected} of its ranks are connected" in error
        connected.pop()
    assert "error" not in ask(handler, get) and "error" not in ask(handler, open_call, b"other", "other")
    assert ask(handler, get)["error"] == LOST and "error" not in ask(handler, get, b"other", "other")


# Over sockets


@contextmanager
def running_server(monkeypatch, keys=None):
    server, stopped = TableServer(keys=keys), threading.Event()
    monkeypatch.setattr(server, "_log", lambda write_line: stopped.is_set() and write_line("stopped"))
    thread = threading.Thread(target=lambda: server.run(sys.exit), daemon=True)
    thread.start()
    yield server
    assert thread.is_alive(), "no message ends a server"
    stopped.set()
    thread.join()
    server.close()


@contextmanager
def connection(server, key_file=""):
    connector = ServerConnector(TableServers((server.address,), key_file, timeout_seconds=1.2), Caller("r", 0))
    yield connector.connect(0)
    connector.close()


@pytest.mark.timeout(20)
def test_only_clients_with_keys_are_answered(tmp_path, monkeypatch):
    """The client without keys pings the server, and says at its end that it has ended."""
    server_keys, trainer_keys = create_key_files(tmp_path / "keys", "server")
    keys = load_keys(str(server_keys), "server")
    with running_server(monkeypatch, keys) as server, connection(server, str(trainer_keys)) as rank:
        assert "error" not in rank.call(calls.open_call(ONE_RANK)).wait().header
        with connection(server) as other, pytest.raises(UserError, match=f"{server.address}: no reply for 1.2 s"):
            other.call(Message({"call": "snapshot", "holder": "h"})).wait()
        assert not server._handler._owned._snapshots
    for address in ("tcp://0.0.0.0:0", "tcp://*:0"):
        with pytest.raises(UserError, match="no keys are set; .*serve-tables --new-keys DIR.*, then serve with --keys"):
            TableServer(address)


def test_a_client_that_sends_garbage_disturbs_no_other(monkeypatch):
    generator, pushes = random.Random(0), [by_rank[0] for by_rank in make_pushes(ONE_RANK, 30, 0)]
    expected = OwnedRows(ONE_RANK)
    with running_server(monkeypatch) as server, zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.connect(server.address)
        with connection(server) as rank:
            rank.call(calls.open_call(ONE_RANK)).wait()
            for round_, push in enumerate(pushes):
                frames = [generator.randbytes(generator.randrange(200)) for _ in range(generator.randrange(1, 5))]
                dealer.send_multipart(frames if round_ % 3 else [b'{"call": "open", "arrays": []}'])
                rank.call(calls.push_call(round_, push)).wait()
                expected.push(0, round_, push)
            reply = rank.call(calls.get_call(Place(0, "weight"), torch.arange(6))).wait()
            assert reply.arrays[0].tolist() == expected.parts(0)["weight"].tolist()
            assert not dealer.poll(50) and server._handler.served.malformed == len(pushes)
