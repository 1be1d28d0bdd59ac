"""zmq contexts that end only when they are closed, never as garbage.

pyzmq ends a context that is garbage, which waits until its sockets are closed. But a context knows its sockets by weak
references, and Python clears those of a cycle before it collects the cycle. After an error, whose traceback holds
context and sockets, the process would wait forever. A context that nobody closes is kept instead, with a thread that
does nothing; its sockets are closed when they are garbage.
"""

import zmq

_OPEN: set[zmq.Context] = set()


def open_context() -> zmq.Context:
    context = zmq.Context()
    _OPEN.add(context)
    return context


def close_context(context: zmq.Context, *, linger: int = 0) -> None:
    """Close the sockets and end the context; unsent messages are waited for at most `linger` milliseconds."""
    context.destroy(linger)
    _OPEN.discard(context)
