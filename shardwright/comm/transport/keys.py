"""CURVE keys of a job's services (readers, table servers) and trainers, and zmq sockets that use them.

The key file of each side holds its own key pair and the other side's public key, so that a host needs only one file.
CURVE encrypts, and authenticates both sides: a service answers only clients that hold the trainers' secret key.
"""

import ipaddress
import os
import re
import tomllib
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType

import zmq
from zmq.auth.thread import ThreadAuthenticator

from shardwright.errors import UserError, check_regular_file

READER_KEYS, SERVER_KEYS = "`shardwright reader keys DIR`", "`shardwright serve-tables --new-keys DIR`"
REMEDIES = MappingProxyType(
    {
        "reader": f"create keys with {READER_KEYS}",
        "table server": f"create keys with {SERVER_KEYS}",
        "server": f"create keys with {SERVER_KEYS}",
        "trainer": f"create keys with {READER_KEYS}, or of table servers with {SERVER_KEYS}",
    }
)
CONNECT_TIMEOUT_MILLISECONDS = 3000
HEARTBEAT_MILLISECONDS = 10_000  # interval of zmq heartbeats to each client
# Until a client without a heartbeat reply is disconnected: long, since on a slow link replies wait for large messages.
HEARTBEAT_TIMEOUT_MILLISECONDS = 60_000
KEY_CHARACTERS = 40


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """Key pair of a side ("reader", "server" or "trainer"), and the public key of the other side."""

    side: str
    public: str
    secret: str
    other: str  # public key of the other side


def create_key_files(directory: Path, service: str = "reader") -> list[Path]:
    """Write a key file for each side, readable only by its owner; raises UserError if a file exists."""
    (public, secret), (trainer, trainer_secret) = ([key.decode() for key in zmq.curve_keypair()] for _ in range(2))
    key_pairs = (CurveKeys(service, public, secret, trainer), CurveKeys("trainer", trainer, trainer_secret, public))
    paths = [directory / f"{keys.side}.keys" for keys in key_pairs]
    for path in paths:
        if path.exists():
            raise UserError(
                f"{path}: already exists; choose another directory, or remove {paths[0].name} and {paths[1].name}"
            )
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for keys, path in zip(key_pairs, paths, strict=True):
            text = f"# Secret: only for hosts of {keys.side}s.\n"
            text += "".join(f"{name} = '{value}'\n" for name, value in asdict(keys).items())
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(text)
    except OSError as error:
        raise UserError(f"{directory}: {error.strerror}; choose a directory with write permission") from None
    return paths


def load_keys(path: str, side: str) -> CurveKeys | None:
    """Read the key file of a side; None for an empty path."""
    if not path:
        return None
    check_regular_file(path)
    try:
        keys = CurveKeys(**tomllib.loads(Path(path).read_text()))
        is_valid = zmq.curve_public(keys.secret.encode()).decode() == keys.public and len(keys.other) == KEY_CHARACTERS
    except (OSError, ValueError, TypeError, AttributeError, zmq.ZMQError) as error:
        raise UserError(f"{path}: not a key file ({error}); {REMEDIES[side]}") from None
    if not is_valid:
        raise UserError(f"{path}: its keys are incomplete or do not match; {REMEDIES[side]}")
    if keys.side != side:
        raise UserError(f"{path}: holds keys of a {keys.side}; give the file {side}.keys that was created with it")
    return keys


def check_address(address: str, keys: CurveKeys | None, remedy: str, service: str = "reader") -> None:
    """Raise UserError unless an address is well formed, and on this host if there are no keys."""
    match = re.fullmatch(r"tcp://([\w.*-]+):(\d{1,5})", address)
    if not match or int(match[2]) >= 1 << 16:
        raise UserError(f'{service} "{address}"; wanted tcp://HOST:PORT, such as tcp://127.0.0.1:5700')
    if keys is None and not _is_loopback(match[1]):
        raise UserError(
            f"{service} {address}: not on this host, and no keys are set; {REMEDIES[service]}, then {remedy}"
        )


def check_addresses(addresses: tuple[str, ...], key_file: str, remedy: str, service: str) -> None:
    """Raise UserError unless clients can connect to all of these addresses; `remedy`: how to set a missing key file."""
    if not addresses or isinstance(addresses, str):
        raise UserError(
            f"{service}s: addresses are {addresses!r}; wanted at least one, such as ('tcp://127.0.0.1:5700',)"
        )
    if len(set(addresses)) < len(addresses):
        raise UserError(f"{service}s: {', '.join(addresses)}: an address is listed twice")
    keys = load_keys(key_file, "trainer")
    for address in addresses:
        check_address(address, keys, remedy, service)
        if re.search(r"\*|:0+$", address):
            raise UserError(
                f"{service} {address}: not an address to connect to; wanted the host and port that it prints"
            )


def bind_router(context: zmq.Context, address: str, keys: CurveKeys | None, service: str, max_bytes: int) -> zmq.Socket:
    """A socket for calls of many clients, whose messages have at most `max_bytes` in a frame."""
    socket = context.socket(zmq.ROUTER)
    socket.router_mandatory = True  # an undeliverable message raises an error instead of being dropped
    socket.linger = 0
    socket.maxmsgsize = max_bytes
    socket.heartbeat_ivl, socket.heartbeat_timeout = HEARTBEAT_MILLISECONDS, HEARTBEAT_TIMEOUT_MILLISECONDS
    secure_socket(socket, keys)
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        raise UserError(
            f"{service} {address}: {zmq.strerror(error.errno or 0)}; choose an address of this host and a free port"
        ) from None
    return socket


def connect_dealer(
    context: zmq.Context, address: str, keys: CurveKeys | None, service: str, *, queues: bool = True
) -> zmq.Socket:
    """A socket for calls to one service. `queues`: while it is not connected, messages wait until it is; else they
    cannot be sent."""
    socket = context.socket(zmq.DEALER)
    socket.immediate = not queues
    socket.linger = 0  # of a socket that is garbage; an orderly end waits
    socket.connect_timeout = CONNECT_TIMEOUT_MILLISECONDS
    secure_socket(socket, keys)
    try:
        socket.connect(address)
    except zmq.ZMQError as error:
        raise UserError(f"{service} {address}: {zmq.strerror(error.errno or 0)}") from None
    return socket


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def secure_socket(socket: zmq.Socket, keys: CurveKeys | None) -> None:
    """Set the CURVE keys of a socket; without keys leave it unencrypted."""
    if keys is None:
        return
    socket.curve_publickey, socket.curve_secretkey = keys.public.encode(), keys.secret.encode()
    if keys.side == "trainer":
        socket.curve_serverkey = keys.other.encode()
    else:
        socket.curve_server = True


class TrainerCredentials:
    """Accepts only clients with the trainers' public key. Called by zmq's authenticator."""

    def __init__(self, keys: CurveKeys) -> None:
        self._trainers = keys.other.encode()

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self._trainers


def start_authenticator(context: zmq.Context, keys: CurveKeys | None) -> ThreadAuthenticator | None:
    """Start a thread that authenticates every connection of this context; None without keys."""
    if keys is None:
        return None
    authenticator = ThreadAuthenticator(context)
    authenticator.start()
    authenticator.configure_curve_callback(domain="*", credentials_provider=TrainerCredentials(keys))
    return authenticator
