"""Run an iterator in a thread, a few items ahead of its consumer."""

from collections.abc import Generator, Iterator
from queue import Full, Queue
from threading import Event, Thread
from typing import Any, TypeVar

Item = TypeVar("Item")

POLL_SECONDS = 0.1  # between checks of a waiting reader for the end of its consumer


def read_ahead(items: Iterator[Item], num: int) -> Generator[Item, None, None]:
    """Yield the items of an iterator that runs in a thread, at most `num` ahead; its error is raised here."""
    queue: Queue[tuple[bool, Any]] = Queue(num)
    is_closed = Event()

    def put(entry: tuple[bool, Any]) -> None:
        while not is_closed.is_set():
            try:
                return queue.put(entry, timeout=POLL_SECONDS)
            except Full:
                continue

    def read() -> None:
        try:
            for item in items:
                put((True, item))
                if is_closed.is_set():
                    return
            put((False, None))
        except BaseException as error:  # of any type: raised by the consumer
            put((False, error))

    thread = Thread(target=read, name="reader", daemon=True)
    thread.start()
    try:
        while True:
            has_item, value = queue.get()
            if not has_item:
                if value is not None:
                    raise value
                return
            yield value
    finally:
        is_closed.set()
        thread.join()
