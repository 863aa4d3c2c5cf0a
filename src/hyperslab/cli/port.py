"""A port for the ranks of this machine to meet at."""

import socket
import sys


def reserve_port() -> socket.socket:
    """A socket bound to a port that only those who ask for it by number will get.

    It never listens, and both it and torch's store set SO_REUSEADDR, so the store may listen
    there, while the system gives the port to nobody who asks for any free one.
    """
    if sys.platform == "linux" and socket.has_dualstack_ipv6():
        # As torch's store: all addresses, so that none of them is in use.
        reserved = socket.socket(socket.AF_INET6)
        reserved.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    else:
        reserved = socket.socket(socket.AF_INET)
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("" if sys.platform == "linux" else "127.0.0.1", 0))
    return reserved
