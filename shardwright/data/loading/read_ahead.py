"""Run an iterator in a thread, a few items ahead of its consumer."""

from collections.abc import Generator, Iterator
from contextlib import suppress
from queue import Full, Queue
from threading import Event, Thread
from typing import Any, TypeVar

Item = TypeVar("Item")

POLL_SECONDS = 0.1  # between checks of a waiting reader for the end of its consumer


def read_ahead(items: Iterator[Item], num: int) -> Generator[Item, None, None]:
    """Yield the items of an iterator that runs in a thread, at most `num` ahead; its error is raised here."""
    queue: Queue[tuple[bool, Any]] = Queue(num)
    is_closed = Event()
    thread = Thread(target=_read, args=(items, queue, is_closed), name="reader", daemon=True)
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


def _read(items: Iterator[Any], queue: "Queue[tuple[bool, Any]]", is_closed: Event) -> None:
    """Put (True, item) for each item, then (False, error or None). Body of the thread."""
    try:
        for item in items:
            _enqueue(queue, (True, item), is_closed)
            if is_closed.is_set():
                return
        _enqueue(queue, (False, None), is_closed)
    except BaseException as error:  # of any type: raised by the consumer
        _enqueue(queue, (False, error), is_closed)


def _enqueue(queue: "Queue[tuple[bool, Any]]", entry: tuple[bool, Any], is_closed: Event) -> None:
    """Put an entry once there is room, unless the consumer has ended."""
    while not is_closed.is_set():
        with suppress(Full):
            return queue.put(entry, timeout=POLL_SECONDS)
