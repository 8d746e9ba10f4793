"""The clients of a core: their connections, their requests, and the messages that are sent to them.

Owned by `engine.core.core_server`. It knows a request only by the ids of the request's sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock.engine.ipc import CoreSocket, CoreToClient, StepUpdates
from penstock.engine.stats import CoreStats
from penstock.errors import PenstockError
from penstock.request import GenerationRequest, RequestUpdate


def refusals(request: GenerationRequest, error: PenstockError) -> list[RequestUpdate]:
    """Return the updates that end a request which the core refuses: one for each sequence, with the error."""
    info = error.info()
    return [
        RequestUpdate(request_id=sequence.request_id, finish_reason="error", error=info)
        for sequence in request.alone()
    ]


class CoreClients:
    """Knows the clients of a core and their requests, and sends each client its updates.

    Args:
        socket: the core's end of the wire to all clients.
        abort: called with the id of a request whose client has gone.
        stats: returns the core's present statistics, which are sent with all updates.
    """

    def __init__(
        self, socket: CoreSocket, abort: Callable[[str], object], stats: Callable[[], CoreStats]
    ) -> None:
        self._socket = socket
        self._abort = abort
        self._stats = stats
        self._owners: dict[str, bytes] = {}  # client of each live request
        self._known: set[bytes] = set()

    @property
    def live_requests(self) -> list[str]:
        """The ids of all requests that some client waits for."""
        return list(self._owners)

    def welcome(self, client: bytes, messages: Sequence[CoreToClient]) -> None:
        """Send these messages to a client that has said hello.

        From now on it also gets what is sent to all.
        """
        # Added before the first `send`, which removes the client again if it has already gone.
        self._known.add(client)
        for message in messages:
            self.send(client, message)
        self.send(client, StepUpdates([], self._stats()))

    def own(self, client: bytes, request: GenerationRequest) -> None:
        """Record that `client` gets the updates of all sequences of this request."""
        self._owners |= {sequence.request_id: client for sequence in request.alone()}

    def disown(self, request_id: str) -> None:
        """Forget which client a request belongs to, so that no client is sent updates of the request."""
        self._owners.pop(request_id, None)

    def refuse(self, client: bytes, request: GenerationRequest, error: PenstockError) -> None:
        """Send a client the error with which the core refuses its request, for each of its sequences."""
        self.send(client, StepUpdates(refusals(request, error), self._stats()))

    def send_updates(self, updates: list[RequestUpdate]) -> None:
        """Send each update to the client of its request.

        Updates of a request without a client are dropped.
        """
        by_client: dict[bytes, list[RequestUpdate]] = {}
        owners = self._owners
        for update in updates:
            client = owners.get(update.request_id)
            if client is not None:
                by_client.setdefault(client, []).append(update)
                if update.finish_reason is not None:
                    del owners[update.request_id]
        stats = self._stats()
        for client, own_updates in by_client.items():
            self.send(client, StepUpdates(own_updates, stats))

    def beat(self) -> None:
        """Send all clients the core's statistics, which is also a sign of life."""
        self.send_all(StepUpdates([], self._stats()))

    def send_all(self, message: CoreToClient) -> None:
        """Send a message to all clients that have said hello."""
        for client in list(self._known):
            self.send(client, message)

    def send(self, client: bytes, message: CoreToClient) -> None:
        """Send a client a message.

        If the client has gone, its requests are aborted here, since it cannot abort them any more [R13].
        """
        if self._socket.send(client, message):
            return
        self._known.discard(client)
        for request_id in [mine for mine, owner in self._owners.items() if owner == client]:
            self._abort(request_id)
            del self._owners[request_id]
