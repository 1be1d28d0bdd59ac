"""Readers apart from trainers: the loader's batches bit for bit, and one clear line for whatever is wrong."""

import os
import socket
import stat
import subprocess
import sys
import time
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st
from reading import Watched, lines, reader
from test_loader import epochs

from shardwright.data.loading.loader import Loader
from shardwright.data.readers import keys, messages
from shardwright.data.readers.client import Readers
from shardwright.data.readers.keys import CurveKeys
from shardwright.data.readers.service import MAX_REQUEST_BYTES, ReaderService
from shardwright.data.sources.source import NumpyBatch, make_order
from shardwright.errors import UserError
from shardwright.jagged import Batch

ORDER = {"batch_size": 8, "seed": 2, "shuffle": True}


def contents(batch: Batch) -> list[Any]:
    tensors = [batch.features.values, batch.features.lengths, batch.dense, batch.weights, *batch.labels.values()]
    told = [(tensor.dtype, tensor.shape, tensor.tolist()) for tensor in tensors if tensor is not None]
    return [batch.features.features, *batch.labels, *told]


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def test_the_same_batches_from_two_readers(tmp_path: Path) -> None:
    log = tmp_path / "log"
    source = Watched(45, str(log))
    load = partial(Loader, Watched(45, str(log)), **ORDER)
    with reader(source, workers=2, **ORDER) as one, reader(source, **ORDER) as other:
        for rank in (0, 1):
            plain = [contents(batch) for batch in islice(epochs(load(shard=(rank, 2))), 15)]
            log.unlink()
            with load(shard=(rank, 2), readers=Readers((one, other)), prefetch=5) as loader:
                assert [contents(batch) for batch in islice(loader, 2)] == plain[:2]
                state = loader.state_dict()
                assert (state["epoch"], state["batch"]) == (0, 2), "what was read ahead was not handed out"
                assert [contents(batch) for batch in islice(epochs(loader), 13)] == plain[2:]
                assert len(set(lines(log))) == 3, "every worker of both read"
                loader.load_state_dict(state)
                assert [contents(batch) for batch in islice(epochs(loader), 13)] == plain[2:]
            local = load(shard=(rank, 2))
            local.load_state_dict(state)
            assert [contents(batch) for batch in islice(epochs(local), 13)] == plain[2:]


def test_many_trainers_at_once() -> None:
    """Shares of fewer samples than ranks are empty for some; batches are written to like any others."""
    source = Watched(21)
    with reader(source, workers=2, **ORDER) as address:
        shards = [(rank, 7) for rank in range(7)]
        crew = [Loader(source, **ORDER, shard=shard, readers=Readers((address,))) for shard in shards]
        plain = [Loader(source, **ORDER, shard=shard) for shard in shards]
        for _ in range(2):
            for mine, theirs in zip(zip(*crew, strict=True), zip(*plain, strict=True), strict=True):
                assert list(map(contents, mine)) == list(map(contents, theirs))
                for batch in mine:
                    batch.features.values.add_(1)
        for loader in crew:
            loader.close()


def test_a_slow_trainer_is_not_read_ahead_for(tmp_path: Path) -> None:
    log = tmp_path / "log"
    source = Watched(None, str(log))
    with (
        reader(source, workers=2, **ORDER) as address,
        Loader(source, **ORDER, readers=Readers((address,)), prefetch=3) as loader,
    ):
        for taken in (1, 2, 3):
            next(iter(loader))
            time.sleep(0.3)
            assert len(lines(log)) == taken + 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 3}, "seed is 3 there and 2 here"),
        ({"batch_size": 9}, "batch_size is 9 there and 8 here"),
        ({"shuffle": False}, "shuffle is False there and True here"),
        (
            {"source": Watched(44)},
            r"size is 44 there and 45 here; source is .Watched\(size=44, .*and .Watched\(size=45",
        ),
    ],
)
def test_a_reader_of_other_batches_is_refused(change: dict[str, Any], message: str) -> None:
    with reader(**{"source": Watched(45), **ORDER} | change) as address:
        loader = Loader(Watched(45), **ORDER, readers=Readers((address,)))
        with pytest.raises(
            UserError, match=rf"^reader {address} serves other batches: {message}.*recipe and overrides$"
        ):
            next(iter(loader))
        assert loader.state_dict()["batch"] == 0


def test_what_reading_costs_comes_back_as_it_is() -> None:
    for source, kind, message in (
        (Watched(45, wrong=44), UserError, "^sample 44 is wrong; drop it$"),
        (
            Watched(45, broken=44),
            RuntimeError,
            r"(?s)^reader tcp://127.*reader worker 0: Traceback .*KeyError: 'a bug'",
        ),
    ):
        order = ORDER | {"shuffle": False}
        plain = [contents(batch) for batch in islice(Loader(source, **order), 5)]
        with reader(source, **order) as address, Loader(source, **order, readers=Readers((address,))) as loader:
            for _ in range(2):  # nor does it end the reader
                assert [contents(batch) for batch in islice(loader, 5)] == plain[loader.state_dict()["batch"] - 5 :]
                with pytest.raises(kind, match=message):
                    next(iter(loader))
                assert loader.state_dict()["batch"] == 5
                loader.load_state_dict(loader.state_dict() | {"batch": 0})


def test_no_reader_is_one_line_in_time() -> None:
    addresses = tuple(f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
    start = time.monotonic()
    with pytest.raises(UserError, match=rf"no reader has replied for 1 s at .*{addresses[0]}.*is one running there"):
        next(iter(Loader(Watched(45), **ORDER, readers=Readers(addresses, timeout_seconds=1.0))))
    assert 1 <= time.monotonic() - start < 3


def test_a_trainer_may_come_first() -> None:
    address = f"tcp://127.0.0.1:{free_port()}"
    program = (
        f"from test_readers import *; print(len(list(Loader(Watched(45), **ORDER, readers=Readers(({address!r},))))))"
    )
    place = {"cwd": Path(__file__).parent, "env": os.environ | {"PYTHONPATH": f"{Path(__file__).parents[1]}"}}
    trainer = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, **place)
    with reader(Watched(45), address=address, **ORDER):
        assert trainer.communicate()[0] == b"6\n"


def test_garbage_does_not_end_a_reader() -> None:
    source = Watched(45)
    asked = messages.BatchRequest("other", (0, 1), 0, ((0, 0),)).encode()
    with reader(source, **ORDER) as address, zmq.Context() as context:
        host, port = address.removeprefix("tcp://").split(":")
        for garbage in (b"GET / HTTP/1.1\r\n\r\n", bytes(range(256)) * 64, b"\xff" + bytes(8) + b"\x7f\x03"):
            with socket.create_connection((host, int(port))) as raw:
                raw.sendall(garbage)
        with context.socket(zmq.DEALER) as dealer:
            dealer.linger = 0
            dealer.connect(address)
            words = [b"", b"{}", b"[" * 10_000, b"\xff", b'{"ask": 1e999}', asked.replace(b"[0, 1]", b"[1, 1]")]
            for word in (
                *words,
                asked.replace(b"[[0, 0]]", b"[[0, -1]]"),
                asked.replace(b'"number": 0', b'"number": 0.5'),
            ):
                dealer.send(word)
                dealer.send_multipart([word, asked])
            dealer.send(asked)
            assert b'"differs"' in dealer.recv(), "the first message that is one"
            dealer.send(bytes(MAX_REQUEST_BYTES + 1))
        plain = [contents(batch) for batch in Loader(source, **ORDER)]
        with Loader(source, **ORDER, readers=Readers((address,))) as loader:
            assert [contents(batch) for batch in loader] == plain


def test_keys(tmp_path: Path) -> None:
    mine, others = (keys.create_key_files(tmp_path / name) for name in ("mine", "others"))
    assert {stat.S_IMODE(path.stat().st_mode) for path in mine} == {0o600}
    with pytest.raises(UserError, match="keys are there already"):
        keys.create_key_files(tmp_path / "mine")
    for side, path in zip(("trainer", "reader"), mine, strict=True):
        with pytest.raises(UserError, match=rf"give the file {side}.keys"):
            keys.load_keys(str(path), side)
    source = Watched(45)
    load = partial(Loader, source, **ORDER)
    with reader(source, keys=str(mine[0]), **ORDER) as address:
        with load(readers=Readers((address,), str(mine[1]))) as loader:
            assert [contents(batch) for batch in loader] == [contents(batch) for batch in load()]
        server = keys.load_keys(str(mine[0]), "reader")
        assert isinstance(server, CurveKeys)
        stranger = tmp_path / "stranger.keys"  # knows the readers' public key, and no more
        stranger.write_text(others[1].read_text().replace(_other(others[1]), server.public))
        for path in ("", str(others[1]), str(stranger)):
            with pytest.raises(UserError, match="no reader has replied for 0.7 s"):
                next(iter(load(readers=Readers((address,), path, timeout_seconds=0.7))))


def _other(path: Path) -> str:
    found = keys.load_keys(str(path), "trainer")
    assert found is not None
    return found.other


def test_mistakes_with_keys_and_addresses(tmp_path: Path) -> None:
    source = Watched(45)
    make = partial(ReaderService, source, make_order(source, **ORDER))
    for address in ("tcp://*:0", "tcp://0.0.0.0:0", "tcp://10.0.0.1:5700", "tcp://example.org:1"):
        remedy = "not on this host, and no keys are set; make keys with `shardwright reader keys DIR`"
        with pytest.raises(UserError, match=f"{remedy}, then serve with --keys"):
            make(bind=address)
        with pytest.raises(UserError, match=f"{remedy}, then set data.reader_keys"):
            Readers((address,))
    for address in ("127.0.0.1:5700", "tcp://127.0.0.1", "tcp://127.0.0.1:99999", "ipc:///tmp/x", "tcp://a b:1"):
        with pytest.raises(UserError, match="wanted tcp://HOST:PORT"):
            Readers((address,))
    in_use = "in use; choose an address of this host and a free port"
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(UserError, match=in_use):
        make(bind=f"tcp://127.0.0.1:{taken.getsockname()[1]}")
    with pytest.raises(UserError, match="set data.workers=1 or more"):
        make(workers=0)
    for addresses in ((), "tcp://127.0.0.1:1"):
        with pytest.raises(UserError, match="wanted at least one, as"):
            Readers(addresses)
    for address in ("tcp://127.0.0.1:0", "tcp://*:5700"):
        with pytest.raises(UserError, match="not an address to connect to|not on this host"):
            Readers((address,))
    with pytest.raises(UserError, match="an address is listed twice"):
        Readers(("tcp://127.0.0.1:1",) * 2)
    with pytest.raises(UserError, match="drop one: readers have workers of their own"):
        Loader(source, **ORDER, workers=1, readers=Readers(("tcp://127.0.0.1:1",)))
    for text in ("", "side = 1", "public = 'x'", "\0"):
        (tmp_path / "wrong").write_text(text)
        with pytest.raises(UserError, match=r"wrong: not a key file \(.*make keys with"):
            keys.load_keys(str(tmp_path / "wrong"), "reader")
    with pytest.raises(UserError, match="gone: not a key file"):
        keys.load_keys("gone", "trainer")


KINDS = st.sampled_from(("<i8", "<i4", "<f4", "<f8", "|b1", "|u1", ">i2"))


@given(KINDS, KINDS, st.integers(0, 5), st.integers(0, 3), st.booleans())
def test_frames_are_the_rows(kind: str, other: str, num: int, features: int, bare: bool) -> None:
    made = NumpyBatch(
        tuple(f"f{at}" for at in range(features)),
        np.arange(3 * num).astype(kind)[::-1],
        np.arange(features * num).reshape(num, features).T,
        None if bare else np.ones((num, 4), np.float32),
        {} if bare else {"a": np.arange(num).astype(other), "label b": np.zeros((num, 2), other)},
        None if bare else np.arange(num, dtype=np.float32),
    )
    sent = [zmq.Frame(bytes(frame)) for frame in messages.encode_batch((1, 2), made)]
    head = messages.decode_header(sent)
    assert head is not None and head["answer"] == [1, 2]
    found = messages.decode_batch(head, sent[1:])
    assert found is not None and found.features == made.features and list(found.labels) == list(made.labels)
    for name in ("values", "lengths", "dense", "weights"):
        assert same(getattr(found, name), getattr(made, name))
    assert all(same(found.labels[name], made.labels[name]) for name in made.labels)
    if num:
        assert (
            messages.decode_batch(head, sent[1:-1]) is None
            and messages.decode_batch(head, [*sent[1:-1], zmq.Frame(b"1")]) is None
        )
    assert messages.decode_batch({**head, "arrays": [("values", "|O", (1,))]}, [zmq.Frame(bytes(8))]) is None


def same(a: np.ndarray | None, b: np.ndarray | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.dtype == b.dtype and a.shape == b.shape and a.tolist() == b.tolist() and a.flags.aligned


def test_what_comes_is_not_copied() -> None:
    """Nor what is sent, where it is large; and it may be written to."""
    made = Watched(None).take(np.arange(1 << 14))
    with zmq.Context() as context, context.socket(zmq.PAIR) as one, context.socket(zmq.PAIR) as other:
        one.linger = other.linger = 0
        other.bind("tcp://127.0.0.1:0")
        one.connect(other.getsockopt_string(zmq.LAST_ENDPOINT))
        sent = messages.encode_batch((0, 0), made)
        assert np.shares_memory(np.frombuffer(sent[1], np.uint8), made.lengths)
        one.send_multipart(sent, copy=False)
        came = other.recv_multipart(copy=False)
        head = messages.decode_header(came)
        assert head is not None
        found = messages.decode_batch(head, came[1:])
        assert found is not None and same(found.values, made.values)
        for array, frame in zip(found.arrays().values(), came[1:], strict=True):
            assert np.shares_memory(array, np.frombuffer(frame.buffer, np.uint8)) and array.flags.writeable
        del found, came
