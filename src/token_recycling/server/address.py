"""The address that the server listens on, without what is slow to import."""

from __future__ import annotations

import errno
import socket

from token_recycling.errors import TokenRecyclingError


def bind(host: str, port: int) -> socket.socket:
    """Return a socket at an address, so that a port in use is found before the model is loaded.

    Raises:
        TokenRecyclingError: the address cannot be used.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(0)  # else two servers could bind the same port before either listens
    except (socket.gaierror, UnicodeError) as error:  # the latter for names that are not valid
        raise TokenRecyclingError(f"--host is {host}; there is no such address") from error
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise TokenRecyclingError(
                f"port {port} is in use; stop the other program or choose another with --port"
            ) from error
        raise TokenRecyclingError(f"cannot use {host}:{port}: {error.strerror}") from error
    return listener
