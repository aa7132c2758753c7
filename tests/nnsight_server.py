"""A stand-in for nnsight's server: takes requests as they are sent, and runs them beside the weights in this process.

Nothing reaches it but what nnsight serialised, and it is read and run where this package cannot be imported. It notes
each request, with its bytes and what it asked of the environment.
"""

import contextlib
import io
import linecache
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from nnsight.intervention.backends.remote import RemoteBackend
from nnsight.schema.request import RequestModel
from nnsight.tracing.globals import BLOCKS, SOURCES
from nnsight.tracing.tracer import _saves, dec, inc


@dataclass
class Request:
    host: str
    model_key: str
    env: dict[str, Any]
    sent: int
    received: int = 0


@dataclass
class Server:
    """Models by key, and the requests that came.

    `heeds_env` False is a server that runs attention as it likes.
    """

    models: dict[str, Any] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)
    heeds_env: bool = True

    def answer(self, backend: RemoteBackend, request: RequestModel, tracer: Any) -> dict[str, Any]:
        payload = backend._serialize(tracer)
        noted = Request(backend.host, request.model_key, request.env, len(payload))
        self.requests.append(noted)
        result = io.BytesIO()
        torch.save(self._run(payload, request), result)
        noted.received = len(result.getvalue())
        return torch.load(io.BytesIO(result.getvalue()), map_location="cpu", weights_only=False)

    def _run(self, payload: bytes, request: RequestModel) -> dict[str, Any]:
        model = self.models[request.model_key]
        if self.heeds_env:
            model._remoteable_set_env(request.env)
        with _own_sources(), _without_this_package():
            tracer = RequestModel.deserialize(payload, model._remoteable_persistent_objects(), request.compress)
            saved: dict[str, Any] = {}
            inc()
            try:
                tracer.execute(tracer.info.code)
                saved = {name: value for name, value in tracer.info.frame.f_locals.items() if id(value) in _saves()}
            finally:
                dec()
        return saved


@contextlib.contextmanager
def _without_this_package() -> Iterator[None]:
    """To import what a server does not have fails."""

    class Refusing:
        def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
            if name.partition(".")[0] == "emergent_heads":
                raise ModuleNotFoundError(f"No module named {name!r}")

    hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "emergent_heads"}
    refusing = Refusing()
    sys.meta_path.insert(0, refusing)
    try:
        yield
    finally:
        sys.meta_path.remove(refusing)
        sys.modules.update(hidden)


@contextlib.contextmanager
def _own_sources() -> Iterator[None]:
    """The server's notes of source are its own: a request knows only the lines it sent."""
    caches: list[Any] = [linecache.cache, SOURCES, BLOCKS]
    notes = [dict(cache) for cache in caches]
    try:
        yield
    finally:
        for cache, kept in zip(caches, notes, strict=True):
            cache.clear()
            cache.update(kept)
