"""Who may talk to whom: keys of the readers and the trainers of a job, and the sockets that hold them.

Each side's file has its own pair and the other side's public key, so that a host needs one file. CURVE encrypts, and
proves each side to the other: a reader answers nobody but who holds the trainers' secret.
"""

import ipaddress
import os
import re
import tomllib
from dataclasses import asdict, dataclass
from pathlib import Path

import zmq
from zmq.auth.thread import ThreadAuthenticator

from shardwright.errors import UserError, check_regular_file

REMEDY = "make keys with `shardwright reader keys DIR`"
KEY_CHARACTERS = 40


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """Those of one side, "reader" or "trainer"."""

    side: str
    public: str
    secret: str
    other: str  # the public key of the other side


def create_key_files(directory: Path) -> list[Path]:
    """A file of keys for each side, which nobody but its owner may read; none is written over."""
    (reader, reader_secret), (trainer, trainer_secret) = (
        [key.decode() for key in zmq.curve_keypair()] for _ in range(2)
    )
    made = (CurveKeys("reader", reader, reader_secret, trainer), CurveKeys("trainer", trainer, trainer_secret, reader))
    paths = [directory / f"{keys.side}.keys" for keys in made]
    for path in paths:
        if path.exists():
            raise UserError(
                f"{path}: keys are there already; choose another directory, or remove {paths[0]} and the other"
            )
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for keys, path in zip(made, paths, strict=True):
            text = f"# For the hosts of {keys.side}s, and secret.\n"
            text += "".join(f"{name} = '{value}'\n" for name, value in asdict(keys).items())
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(text)
    except OSError as error:
        raise UserError(f"{directory}: {error.strerror}; choose a directory you may write to") from None
    return paths


def load_keys(path: str, side: str) -> CurveKeys | None:
    """The keys of a side, from its file; none without a path."""
    if not path:
        return None
    check_regular_file(path)
    try:
        found = CurveKeys(**tomllib.loads(Path(path).read_text()))
        paired = zmq.curve_public(found.secret.encode()).decode() == found.public and len(found.other) == KEY_CHARACTERS
    except (OSError, ValueError, TypeError, AttributeError, zmq.ZMQError) as error:
        raise UserError(f"{path}: no file of keys ({error}); {REMEDY}") from None
    if not paired:
        raise UserError(f"{path}: its keys do not belong together; {REMEDY}")
    if found.side != side:
        raise UserError(f"{path}: the keys of a {found.side}; give the file {side}.keys that was made beside it")
    return found


def check_address(address: str, keys: CurveKeys | None, remedy: str) -> None:
    """An address is of this host, or there are keys."""
    found = re.fullmatch(r"tcp://([\w.*-]+):(\d{1,5})", address)
    if not found or int(found[2]) >= 1 << 16:
        raise UserError(f'reader "{address}"; wanted tcp://HOST:PORT, as tcp://127.0.0.1:5700')
    if keys is None and not _is_loopback(found[1]):
        raise UserError(f"reader {address}: beyond this host, and without keys; {REMEDY}, then {remedy}")


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def secure_socket(socket: zmq.Socket, keys: CurveKeys | None) -> None:
    """Have a socket hold these keys."""
    if keys is None:
        return
    socket.curve_publickey, socket.curve_secretkey = keys.public.encode(), keys.secret.encode()
    if keys.side == "reader":
        socket.curve_server = True
    else:
        socket.curve_serverkey = keys.other.encode()


class TrainerCredentials:
    """What a reader's context asks of whom it lets in."""

    def __init__(self, keys: CurveKeys) -> None:
        self._trainers = keys.other.encode()

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self._trainers


def start_authenticator(context: zmq.Context, keys: CurveKeys | None) -> ThreadAuthenticator | None:
    """A thread that is asked for every connection of this context; where there are no keys, none."""
    if keys is None:
        return None
    made = ThreadAuthenticator(context)
    made.start()
    made.configure_curve_callback(domain="*", credentials_provider=TrainerCredentials(keys))
    return made
