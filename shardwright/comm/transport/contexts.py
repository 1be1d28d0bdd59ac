"""zmq contexts that end only when they are closed, never as garbage.

pyzmq ends a context that is garbage, which waits until its sockets are closed. But a context knows its sockets by weak
references, and Python clears those of a cycle before it collects the cycle. After an error, whose traceback holds
context and sockets, the process would wait forever. A context that nobody closes is kept instead, with a thread that
does nothing; its sockets are closed when they are garbage.
"""

import weakref

import zmq


class KeptContext:
    """`context` lives until `close`, also if nothing else refers to it."""

    def __init__(self) -> None:
        self.context = zmq.Context()
        self._keeper = weakref.finalize(self.context, self.context.destroy)  # the method refers to the context
        self._keeper.atexit = False

    def close(self, *, linger: int = 0) -> None:
        """Close the sockets and end the context; unsent messages are waited for at most `linger` milliseconds."""
        self.context.destroy(linger)
        self._keeper.detach()
