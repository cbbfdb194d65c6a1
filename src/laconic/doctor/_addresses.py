"""This host's networks, as the system knows them. What cannot be found is left out."""

from __future__ import annotations

import errno
import socket
import struct
import time

_GET_ADDRESS = 0x8915  # SIOCGIFADDR of Linux
_RETRY_S = 0.2


def interfaces() -> dict[str, str]:
    """IPv4 addresses by interface; empty where the system does not say."""
    try:
        import fcntl
    except ModuleNotFoundError:  # Windows
        return {}
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(one.fileno(), _GET_ADDRESS, request)
            except OSError:  # it has no address, or this is no Linux
                continue
            found[name] = socket.inet_ntoa(answer[20:24])
    return found


def address_of_name() -> str | None:
    """The first address of the host's own name, which Gloo takes."""
    try:
        return str(socket.getaddrinfo(socket.gethostname(), None)[0][4][0])
    except OSError:
        return None


def route_to(host: str) -> str | None:
    """This host's address on the way to another. Nothing is sent."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
            one.connect((host, 9))
            return str(one.getsockname()[0])
    except OSError:
        return None


def unreachable(host: str, port: int, timeout_s: float) -> str | None:
    """Why nobody answers there, or None; whoever starts to listen within the time is found."""
    end = time.monotonic() + timeout_s
    while True:
        left = end - time.monotonic()
        try:
            socket.create_connection((host, port), max(left, 0.1)).close()
            return None
        except socket.gaierror:
            return f"the name {host} does not resolve"
        except ConnectionRefusedError:
            why = "nothing listens there"
        except TimeoutError:
            why = f"no answer in {timeout_s:g} s"
        except OSError as error:
            why = error.strerror or str(error)
        if time.monotonic() + _RETRY_S >= end:
            return why
        time.sleep(_RETRY_S)


def port_is_free(port: int) -> bool:
    """Whether a program of this host could listen there."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            one.bind(("", port))
        except OSError as error:
            return error.errno not in (errno.EADDRINUSE, errno.EACCES)
        return True
