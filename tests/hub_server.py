"""A hub on the loopback address that the real `huggingface_hub` client talks to.

It serves saved models as revisions and fails on request::

    with serving({("org/tiny", "step1"): folder}) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)      # or hub.environment(cache) for all variables at once
        hub.fail("resolve", status=503, times=2)

Folders may also be made lazily: pass `folder_of(repository, revision) -> Path | None` and
`revisions_of(repository) -> list of names`.
"""

import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlencode, urlsplit

import pytest

FolderOf = Callable[[str, str], Path | None]
RevisionsOf = Callable[[str], list[str]]
Query = Mapping[str, list[str]]


@dataclass
class Fault:
    """What goes wrong: for requests whose path holds `where`, the next `times` times (always if None)."""

    where: str
    status: int | None = None  # answer with this status
    drop: bool = False  # close the connection without an answer
    truncate: bool = False  # send half the file and say that this is all
    times: int | None = None

    def applies(self, path: str, sends_file: bool) -> bool:
        if self.where not in path or self.times == 0 or (self.truncate and not sends_file):
            return False
        if self.times is not None:
            self.times -= 1
        return True


@dataclass
class Hub:
    """A running server; `requests` are the "METHOD path" it has seen.

    Revisions in `tags` are served as tags, the others as branches; those in `same_commit` have the commit of another.
    Weights are told with the hash of their content, as files in LFS are, and folders `page_size` entries at a time.
    """

    folder_of: FolderOf
    revisions_of: RevisionsOf
    endpoint: str = ""
    requests: list[str] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    tags: set[tuple[str, str]] = field(default_factory=set)
    same_commit: dict[tuple[str, str], str] = field(default_factory=dict)
    page_size: int = 1000
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def fail(self, where: str = "", *, times: int | None = None, **how) -> None:
        """Adds a fault: `status=503`, `drop=True` or `truncate=True`."""
        self.faults.append(Fault(where, times=times, **how))

    def environment(self, cache: Path) -> dict[str, str]:
        """Variables that point client and library to this server and to caches of their own in `cache`."""
        return {
            "HF_ENDPOINT": self.endpoint,
            "HF_HUB_CACHE": str(cache / "hub"),
            "EMERGENT_HEADS_CACHE": str(cache / "emergent_heads"),
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        }

    def fetched(self, name: str) -> int:
        """How often the file `name` was downloaded."""
        return sum(request.startswith("GET") and request.endswith(f"/{name}") for request in self.requests)

    def commit(self, repository: str, revision: str) -> str:
        revision = self.same_commit.get((repository, revision), revision)
        return hashlib.sha1(f"{repository}@{revision}".encode()).hexdigest()

    def revision(self, repository: str, name: str) -> str | None:
        """The revision of a name or commit."""
        revisions = self.revisions_of(repository)
        if name in revisions:
            return name
        return next((revision for revision in revisions if self.commit(repository, revision) == name), None)

    def fault(self, path: str, sends_file: bool) -> Fault | None:
        with self._lock:
            return next((fault for fault in self.faults if fault.applies(path, sends_file)), None)


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"{self.command} {path}")
        fault = self.hub.fault(path, sends_file=self.command == "GET" and "/resolve/" in path)
        if fault is not None and fault.drop:
            self.close_connection = True
            return
        if fault is not None and fault.status is not None:
            return self._send(fault.status, b"{}")
        if match := re.fullmatch(r"/api/models/([\w.-]+/[\w.-]+)/(refs|tree|revision)(?:/(.+))?", path):
            return self._answer_api(*match.groups(), query=parse_qs(urlsplit(self.path).query))
        if match := re.fullmatch(r"/([\w.-]+/[\w.-]+)/resolve/(.+/.+)", path):
            revision, filename = self._split(*match.groups())
            return self._send_file(match[1], revision, filename, half=fault is not None and fault.truncate)
        return self._send(404, b"{}")

    def _answer_api(self, repository: str, what: str, name: str | None, query: Query) -> None:
        revisions = self.hub.revisions_of(repository)
        if not revisions:
            return self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        if what == "refs":
            refs: dict[str, list[dict[str, str]]] = {"branches": [], "converts": [], "tags": []}
            for name in revisions:
                kind, at = ("tags", "tags") if (repository, name) in self.hub.tags else ("branches", "heads")
                commit = self.hub.commit(repository, name)
                refs[kind].append({"name": name, "ref": f"refs/{at}/{name}", "targetCommit": commit})
            return self._send_json(refs)
        name, under = self._split(repository, name or "main")
        found = self._folder(repository, name)
        if found is None:
            return None
        revision, folder = found
        if what == "tree":
            return self._send_tree(folder, under, query)
        siblings = [{"rfilename": str(p.relative_to(folder))} for p in sorted(folder.rglob("*")) if p.is_file()]
        sha = self.hub.commit(repository, revision)
        return self._send_json({"id": repository, "sha": sha, "siblings": siblings})

    def _split(self, repository: str, path: str) -> tuple[str, str]:
        """A path that begins with a revision, which may hold slashes: the revision, and the rest."""
        parts = path.split("/")
        splits = [("/".join(parts[:at]), "/".join(parts[at:])) for at in range(1, len(parts) + 1)]
        known = [split for split in splits if self.hub.revision(repository, split[0]) is not None]
        return known[0] if known else splits[0]

    def _send_tree(self, folder: Path, under: str, query: Query) -> None:
        """What lies in `folder / under`, and deeper if asked for, as the hub lists it: page by page."""
        if not (folder / under).is_dir():
            return self._send(404, b"{}", {"X-Error-Code": "EntryNotFound"})
        recursive = query.get("recursive", [""])[0].lower() == "true"
        paths = sorted((folder / under).rglob("*") if recursive else (folder / under).iterdir())
        start = int(query.get("cursor", ["0"])[0])
        end = start + self.hub.page_size
        headers = {"Content-Type": "application/json"}
        if end < len(paths):
            following = urlencode({**{name: values[0] for name, values in query.items()}, "cursor": end})
            headers["Link"] = f'<{self.hub.endpoint}{urlsplit(self.path).path}?{following}>; rel="next"'
        return self._send(200, json.dumps([_entry(path, folder) for path in paths[start:end]]).encode(), headers)

    def _send_file(self, repository: str, name: str, filename: str, half: bool) -> None:
        found = self._folder(repository, name)
        if found is None:
            return None
        revision, folder = found
        headers = {"X-Repo-Commit": self.hub.commit(repository, revision)}
        if not (folder / filename).is_file():
            return self._send(404, b"", headers | {"X-Error-Code": "EntryNotFound"})
        content = (folder / filename).read_bytes()
        headers |= {"ETag": f'"{_etag(folder / filename)}"', "X-Linked-Size": str(len(content))}
        start = int(match[1]) if (match := re.match(r"bytes=(\d+)-", self.headers.get("Range", ""))) else 0
        if half:
            return self._send(200, content[: len(content) // 2], headers)
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        return self._send(206 if start else 200, content[start:], headers)

    def _folder(self, repository: str, name: str) -> tuple[str, Path] | None:
        revision = self.hub.revision(repository, name)
        folder = revision and self.hub.folder_of(repository, revision)
        if not revision or not folder:
            return self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        return revision, folder

    def _send_json(self, content: object) -> None:
        self._send(200, json.dumps(content).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, content: bytes, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Keeps the tests' output quiet."""


def _etag(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()


def _entry(path: Path, folder: Path) -> dict[str, object]:
    """A file or folder as the hub lists it."""
    name = str(path.relative_to(folder))
    if not path.is_file():
        return {"type": "directory", "path": name, "oid": "0" * 40}
    entry: dict[str, object] = {"type": "file", "path": name, "size": path.stat().st_size, "oid": _etag(path)}
    if path.suffix in (".safetensors", ".bin", ".pth"):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        entry["lfs"] = {"oid": content, "size": path.stat().st_size, "pointerSize": 134}
    return entry


@contextmanager
def serving(
    folders: Mapping[tuple[str, str], Path] | FolderOf, revisions_of: RevisionsOf | None = None
) -> Iterator[Hub]:
    """Serves `(repository, revision) -> folder` until the block ends."""
    if isinstance(folders, Mapping):
        known = folders

        def folder_of(repository: str, revision: str) -> Path | None:
            return known.get((repository, revision))

        def all_revisions(repository: str) -> list[str]:
            return [revision for owner, revision in known if owner == repository]

        hub = Hub(folder_of, revisions_of or all_revisions)
    else:
        assert revisions_of is not None, "a function of folders needs a function of revisions"
        hub = Hub(folders, revisions_of)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def use_hub(monkeypatch: pytest.MonkeyPatch, hub: Hub, cache: Path) -> list[float]:
    """Points this process to `hub` and makes waiting instant; gives the list of the waits asked for."""
    for name, value in hub.environment(cache).items():
        monkeypatch.setenv(name, value)
    waits: list[float] = []
    monkeypatch.setattr("time.sleep", waits.append)
    return waits
