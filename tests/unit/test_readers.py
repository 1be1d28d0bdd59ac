"""Readers in other processes give the loader's batches bit for bit; their errors are one line."""

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
from reading import Samples, lines, reader
from test_loader import epochs

from shardwright.comm.transport import keys
from shardwright.comm.transport.keys import CurveKeys
from shardwright.data.loading.loader import Loader
from shardwright.data.readers import messages
from shardwright.data.readers.client import Readers
from shardwright.data.readers.service import MAX_REQUEST_BYTES, ReaderService
from shardwright.data.sources.source import NumpyBatch, make_order
from shardwright.errors import UserError
from shardwright.jagged import Batch

ORDER = {"batch_size": 8, "seed": 2, "shuffle": True}


def contents(batch: Batch) -> list[Any]:
    tensors = [batch.features.values, batch.features.lengths, batch.dense, batch.weights, *batch.labels.values()]
    values = [(tensor.dtype, tensor.shape, tensor.tolist()) for tensor in tensors if tensor is not None]
    return [batch.features.features, *batch.labels, *values]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def test_two_readers_give_the_loaders_batches(tmp_path: Path) -> None:
    log = tmp_path / "log"
    source = Samples(45, str(log), seconds=0.02)  # slow enough to need both workers
    load = partial(Loader, source, **ORDER)
    with reader(source, workers=2, **ORDER) as first, reader(source, **ORDER) as second:
        for rank in (0, 1):
            expected = [contents(batch) for batch in islice(epochs(load(shard=(rank, 2))), 15)]
            log.unlink()
            with load(shard=(rank, 2), readers=Readers((first, second)), prefetch=5) as loader:
                assert [contents(batch) for batch in islice(loader, 2)] == expected[:2]
                state = loader.state_dict()
                assert (state["epoch"], state["batch"]) == (0, 2), "prefetched batches do not count"
                assert [contents(batch) for batch in islice(epochs(loader), 13)] == expected[2:]
                assert len(set(lines(log))) == 3, "all workers of both readers read"
                loader.load_state_dict(state)
                assert [contents(batch) for batch in islice(epochs(loader), 13)] == expected[2:]
            local = load(shard=(rank, 2))
            local.load_state_dict(state)
            assert [contents(batch) for batch in islice(epochs(local), 13)] == expected[2:]


def test_a_reader_serves_many_trainers() -> None:
    """With fewer samples than ranks some local batches are empty; batches may be written to."""
    source = Samples(21)
    with reader(source, workers=2, **ORDER) as address:
        shards = [(rank, 7) for rank in range(7)]
        loaders = [Loader(source, **ORDER, shard=shard, readers=Readers((address,))) for shard in shards]
        local = [Loader(source, **ORDER, shard=shard) for shard in shards]
        for _ in range(2):
            for reader_batches, expected in zip(zip(*loaders, strict=True), zip(*local, strict=True), strict=True):
                assert list(map(contents, reader_batches)) == list(map(contents, expected))
                for batch in reader_batches:
                    batch.features.values.add_(1)
        for loader in loaders:
            loader.close()


def test_a_reader_reads_only_requested_batches(tmp_path: Path) -> None:
    log = tmp_path / "log"
    source = Samples(None, str(log))
    with (
        reader(source, workers=2, **ORDER) as address,
        Loader(source, **ORDER, readers=Readers((address,)), prefetch=3) as loader,
    ):
        for num_taken in (1, 2, 3):
            next(iter(loader))
            time.sleep(0.3)
            assert len(lines(log)) == num_taken + 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 3}, "seed is 3 there and 2 here"),
        ({"batch_size": 9}, "batch_size is 9 there and 8 here"),
        ({"shuffle": False}, "shuffle is False there and True here"),
        (
            {"source": Samples(44)},
            r"size is 44 there and 45 here; source is .Samples\(size=44, .*and .Samples\(size=45",
        ),
    ],
)
def test_a_reader_of_other_batches_is_refused(change: dict[str, Any], message: str) -> None:
    with reader(**{"source": Samples(45), **ORDER} | change) as address:
        loader = Loader(Samples(45), **ORDER, readers=Readers((address,)))
        with pytest.raises(
            UserError, match=rf"^reader {address} serves other batches: {message}.*recipe and overrides$"
        ):
            next(iter(loader))
        assert loader.state_dict()["batch"] == 0


def test_errors_of_the_source_reach_the_trainer() -> None:
    for source, kind, message in (
        (Samples(45, invalid=44), UserError, "^sample 44 is invalid; drop it$"),
        (
            Samples(45, buggy=44),
            RuntimeError,
            r"(?s)^reader tcp://127.*reader worker 0: Traceback .*KeyError: 'a bug'",
        ),
    ):
        order = ORDER | {"shuffle": False}
        expected = [contents(batch) for batch in islice(Loader(source, **order), 5)]
        with reader(source, **order) as address, Loader(source, **order, readers=Readers((address,))) as loader:
            for _ in range(2):  # the error does not end the reader
                assert [contents(batch) for batch in islice(loader, 5)] == expected[loader.state_dict()["batch"] - 5 :]
                with pytest.raises(kind, match=message):
                    next(iter(loader))
                assert loader.state_dict()["batch"] == 5
                loader.load_state_dict(loader.state_dict() | {"batch": 0})


def test_a_missing_reader_is_a_one_line_error_after_the_timeout() -> None:
    addresses = tuple(f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
    start = time.monotonic()
    message = rf"no reader has replied for 1 s at .*{addresses[0]}.*is a reader running there"
    with pytest.raises(UserError, match=message):
        next(iter(Loader(Samples(45), **ORDER, readers=Readers(addresses, timeout_seconds=1.0))))
    assert 1 <= time.monotonic() - start < 3


def test_a_trainer_may_start_before_its_reader() -> None:
    address = f"tcp://127.0.0.1:{free_port()}"
    program = (
        f"from test_readers import *; print(len(list(Loader(Samples(45), **ORDER, readers=Readers(({address!r},))))))"
    )
    options = {"cwd": Path(__file__).parent, "env": os.environ | {"PYTHONPATH": f"{Path(__file__).parents[1]}"}}
    trainer = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, **options)
    with reader(Samples(45), address=address, **ORDER):
        assert trainer.communicate()[0] == b"6\n"


def test_invalid_messages_do_not_end_a_reader() -> None:
    source = Samples(45)
    request = messages.BatchRequest("other", (0, 1), 0, ((0, 0),)).encode()
    with reader(source, **ORDER) as address, zmq.Context() as context:
        host, port = address.removeprefix("tcp://").split(":")
        for garbage in (b"GET / HTTP/1.1\r\n\r\n", bytes(range(256)) * 64, b"\xff" + bytes(8) + b"\x7f\x03"):
            with socket.create_connection((host, int(port))) as connection:
                connection.sendall(garbage)
        with context.socket(zmq.DEALER) as dealer:
            dealer.linger = 0
            dealer.connect(address)
            invalid = [b"", b"{}", b"[" * 10_000, b"\xff", b'{"ask": 1e999}', request.replace(b"[0, 1]", b"[1, 1]")]
            for message in (
                *invalid,
                request.replace(b"[[0, 0]]", b"[[0, -1]]"),
                request.replace(b'"number": 0', b'"number": 0.5'),
            ):
                dealer.send(message)
                dealer.send_multipart([message, request])
            dealer.send(request)
            assert b'"differs"' in dealer.recv(), "only the valid request gets a reply"
            dealer.send(bytes(MAX_REQUEST_BYTES + 1))
        expected = [contents(batch) for batch in Loader(source, **ORDER)]
        with Loader(source, **ORDER, readers=Readers((address,))) as loader:
            assert [contents(batch) for batch in loader] == expected


def test_keys(tmp_path: Path) -> None:
    key_files, other_files = (keys.create_key_files(tmp_path / name) for name in ("mine", "others"))
    assert {stat.S_IMODE(path.stat().st_mode) for path in key_files} == {0o600}
    with pytest.raises(UserError, match="already exists"):
        keys.create_key_files(tmp_path / "mine")
    for side, path in zip(("trainer", "reader"), key_files, strict=True):
        with pytest.raises(UserError, match=rf"give the file {side}.keys"):
            keys.load_keys(str(path), side)
    source = Samples(45)
    load = partial(Loader, source, **ORDER)
    with reader(source, keys=str(key_files[0]), **ORDER) as address:
        with load(readers=Readers((address,), str(key_files[1]))) as loader:
            assert [contents(batch) for batch in loader] == [contents(batch) for batch in load()]
        server = keys.load_keys(str(key_files[0]), "reader")
        assert isinstance(server, CurveKeys)
        stranger = tmp_path / "stranger.keys"  # has the readers' public key, but its own is not accepted
        stranger.write_text(other_files[1].read_text().replace(_reader_key(other_files[1]), server.public))
        for path in ("", str(other_files[1]), str(stranger)):
            with pytest.raises(UserError, match="no reader has replied for 0.7 s"):
                next(iter(load(readers=Readers((address,), path, timeout_seconds=0.7))))


def _reader_key(path: Path) -> str:
    trainer_keys = keys.load_keys(str(path), "trainer")
    assert trainer_keys is not None
    return trainer_keys.other


def test_errors_in_keys_and_addresses(tmp_path: Path) -> None:
    source = Samples(45)
    make = partial(ReaderService, source, make_order(source, **ORDER))
    for address in ("tcp://*:0", "tcp://0.0.0.0:0", "tcp://10.0.0.1:5700", "tcp://example.org:1"):
        remedy = "not on this host, and no keys are set; create keys with `shardwright reader keys DIR`"
        with pytest.raises(UserError, match=f"{remedy}, then serve with --keys"):
            make(bind=address)
        with pytest.raises(UserError, match=f"{remedy}, then set data.reader_keys"):
            Readers((address,))
    for address in ("127.0.0.1:5700", "tcp://127.0.0.1", "tcp://127.0.0.1:99999", "ipc:///tmp/x", "tcp://a b:1"):
        with pytest.raises(UserError, match="wanted tcp://HOST:PORT"):
            Readers((address,))
    in_use = "in use; choose an address of this host and a free port"
    with socket.create_server(("127.0.0.1", 0)) as listener, pytest.raises(UserError, match=in_use):
        make(bind=f"tcp://127.0.0.1:{listener.getsockname()[1]}")
    with pytest.raises(UserError, match="set data.workers=1 or more"):
        make(workers=0)
    for addresses in ((), "tcp://127.0.0.1:1"):
        with pytest.raises(UserError, match="wanted at least one, such as"):
            Readers(addresses)
    for address in ("tcp://127.0.0.1:0", "tcp://*:5700"):
        with pytest.raises(UserError, match="not an address to connect to|not on this host"):
            Readers((address,))
    with pytest.raises(UserError, match="an address is listed twice"):
        Readers(("tcp://127.0.0.1:1",) * 2)
    with pytest.raises(UserError, match="drop one: readers start their own workers"):
        Loader(source, **ORDER, workers=1, readers=Readers(("tcp://127.0.0.1:1",)))
    for text in ("", "side = 1", "public = 'x'", "\0"):
        (tmp_path / "wrong").write_text(text)
        with pytest.raises(UserError, match=r"wrong: not a key file \(.*create keys with"):
            keys.load_keys(str(tmp_path / "wrong"), "reader")
    with pytest.raises(UserError, match="gone: not a key file"):
        keys.load_keys("gone", "trainer")


KINDS = st.sampled_from(("<i8", "<i4", "<f4", "<f8", "|b1", "|u1", ">i2"))


@given(KINDS, KINDS, st.integers(0, 5), st.integers(0, 3), st.booleans())
def test_frames_decode_to_the_encoded_batch(kind: str, other: str, size: int, features: int, labels_only: bool) -> None:
    batch = NumpyBatch(
        tuple(f"f{i}" for i in range(features)),
        np.arange(3 * size).astype(kind)[::-1],
        np.arange(features * size).reshape(size, features).T,
        None if labels_only else np.ones((size, 4), np.float32),
        {} if labels_only else {"a": np.arange(size).astype(other), "label b": np.zeros((size, 2), other)},
        None if labels_only else np.arange(size, dtype=np.float32),
    )
    frames = [zmq.Frame(bytes(frame)) for frame in messages.encode_batch((1, 2), batch)]
    header = messages.decode_header(frames)
    assert header is not None and header["answer"] == [1, 2]
    decoded = messages.decode_batch(header, frames[1:])
    assert decoded is not None and decoded.features == batch.features and list(decoded.labels) == list(batch.labels)
    for name in ("values", "lengths", "dense", "weights"):
        assert equal_arrays(getattr(decoded, name), getattr(batch, name))
    assert all(equal_arrays(decoded.labels[name], batch.labels[name]) for name in batch.labels)
    if size:
        assert (
            messages.decode_batch(header, frames[1:-1]) is None
            and messages.decode_batch(header, [*frames[1:-1], zmq.Frame(b"1")]) is None
        )
    assert messages.decode_batch({**header, "arrays": [("values", "|O", (1,))]}, [zmq.Frame(bytes(8))]) is None


def equal_arrays(a: np.ndarray | None, b: np.ndarray | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.dtype == b.dtype and a.shape == b.shape and a.tolist() == b.tolist() and a.flags.aligned


def test_arrays_are_sent_and_received_without_copies() -> None:
    """Large arrays are not copied at either end; received ones are writeable."""
    batch = Samples(None).take(np.arange(1 << 14))
    with zmq.Context() as context, context.socket(zmq.PAIR) as sender, context.socket(zmq.PAIR) as receiver:
        sender.linger = receiver.linger = 0
        receiver.bind("tcp://127.0.0.1:0")
        sender.connect(receiver.getsockopt_string(zmq.LAST_ENDPOINT))
        frames = messages.encode_batch((0, 0), batch)
        assert np.shares_memory(np.frombuffer(frames[1], np.uint8), batch.lengths)
        sender.send_multipart(frames, copy=False)
        received = receiver.recv_multipart(copy=False)
        header = messages.decode_header(received)
        assert header is not None
        decoded = messages.decode_batch(header, received[1:])
        assert decoded is not None and equal_arrays(decoded.values, batch.values)
        for array, frame in zip(decoded.arrays().values(), received[1:], strict=True):
            assert np.shares_memory(array, np.frombuffer(frame.buffer, np.uint8)) and array.flags.writeable
        del decoded, received
