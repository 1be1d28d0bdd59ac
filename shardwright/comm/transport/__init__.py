"""Messages between processes over zmq sockets, with keys beyond this host: of readers and of table servers."""
