"""A warning about a connection under TLS says where that was made."""

from __future__ import annotations

import socket
import ssl

import pytest


def test_a_connection_that_was_not_closed_tells_where_it_was_made() -> None:
    ours, theirs = socket.socketpair()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with theirs:
        connection = context.wrap_socket(ours, server_side=True, do_handshake_on_connect=False)
        with pytest.warns(ResourceWarning, match=r"made at /tests/unit/test_told_connections\.py:\d+"):
            del connection
