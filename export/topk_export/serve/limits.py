"""Bounds on a client's share of the service, and who may use it."""

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Bounds of the service, for all clients together and for one of them.

    Args:
        body_bytes: length of a body.
        body_seconds: time in which a body must come.
        request_seconds: time in which a request is answered; then it gets a 503.
        images: images or rows of one request.
        answer_bytes: length of an answer with tensors.
        max_set: classes of one prediction set in an answer.
        queue: requests in progress.
        client_requests: requests in progress from one address.
        connections: open connections; beyond it the one that has been idle longest is closed.
        client_connections: the same for one address.
        idle_seconds: time that a connection may stay open without a complete request header.
        batch: inputs of one run of the model.
        delay_seconds: time that an input waits for others to join its run.
        decoders: threads that decode images.
        require_group: refuse requests that name no group, where the model has thresholds by group.
    """

    body_bytes: int = 10_000_000
    body_seconds: float = 30.0
    request_seconds: float = 30.0
    images: int = 32
    answer_bytes: int = 50_000_000
    max_set: int = 1000
    queue: int = 128
    client_requests: int = 64
    connections: int = 1000
    client_connections: int = 256
    idle_seconds: float = 10.0
    batch: int = 16
    delay_seconds: float = 0.005
    decoders: int = min(8, max(2, os.cpu_count() or 1))
    require_group: bool = False


@dataclass(frozen=True)
class Access:
    """Keys, hosts and web origins that may use the service.

    Args:
        keys: API keys; with none, no key is asked for.
        hosts: names that a request's Host header may have; with none, any.
        origins: web origins, such as ``https://example.com``, whose pages may call the service; ``*`` for all.
        log: file that gets a line of JSON for each request; ``-`` is standard output.
    """

    keys: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    log: str | None = None
