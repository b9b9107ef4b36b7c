"""A client of Latchwork's HTTP API: locks, claims, tasks and workers. One module, the standard library only.

Every call that changes something carries an ``Idempotency-Key``, so it is repeated safely when a connection breaks.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import random
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.client import HTTPException
from types import TracebackType
from typing import Any

__all__ = ["Failed", "Latchwork", "Lock", "LockLost", "Problem", "Task", "Unreachable", "Worker", "verify"]

#: The longest wait of one request. A longer wait is several requests.
_LONGEST_WAIT = 30.0


class Problem(Exception):
    """An answer that is no success. ``code`` is stable; ``fields`` are all fields of the problem document."""

    def __init__(self, status: int, fields: Mapping[str, Any]) -> None:
        self.status = status
        self.fields = dict(fields)
        self.code = str(fields.get("code", ""))
        super().__init__(f"{status} {self.code}: {fields.get('detail') or fields.get('title') or 'no detail'}")


class Unreachable(Exception):
    """The server did not answer within the client's patience. A call that changes something may have had its effect."""


class LockLost(Exception):
    """The session ended before its lock was released: another owner may hold the lock."""


class Failed(Exception):
    """Raised by the code of a worker: the attempt has failed, in these words."""

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        details: Any = None,
        retryable: bool = True,
        pause: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message, self.code, self.details = message, code, details
        self.retryable, self.pause = retryable, pause


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirect would carry the token elsewhere."""

    def redirect_request(self, *_: Any) -> None:
        return None


class Latchwork:
    """A server, and the namespace that is used there. It may be shared by threads."""

    def __init__(
        self,
        url: str = "http://127.0.0.1:7420",
        *,
        token: str | None = None,
        namespace: str | None = None,
        patience: float = 30.0,
    ) -> None:
        """``patience``: for how many seconds a call is repeated while the server cannot be reached or is busy."""
        prefix = "/v1" if namespace is None else f"/v1/ns/{_encoded(namespace)}"
        self._base = url.rstrip("/") + prefix
        self._token = token
        self._patience = patience
        # The environment must not send the token to a proxy.
        self._opener = urllib.request.build_opener(_NoRedirects, urllib.request.ProxyHandler({}))

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        key: str | None = None,
        takes: float = 0.0,
        patience: float | None = None,
    ) -> Any:
        """Sends a request until it is answered, and returns the JSON of the answer. ``takes``: for how many seconds the
        server may wait before it answers. ``patience``: for how many seconds it is repeated."""
        more = {"query": query, "headers": headers, "key": key, "takes": takes, "patience": patience}
        return self._send(method, path, body, **more)[1]

    def _send(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        key: str | None = None,
        takes: float = 0.0,
        patience: float | None = None,
        keyed: bool = True,
    ) -> tuple[int, Any]:
        url = self._base + path + ("?" + urllib.parse.urlencode(query) if query else "")
        sent = {"Accept": "application/json", **(headers or {})}
        if self._token is not None:
            sent["Authorization"] = f"Bearer {self._token}"
        data = None if body is None else json.dumps(body).encode()
        if data is not None:
            sent["Content-Type"] = "application/json"
        if keyed and method not in ("GET", "HEAD"):
            sent["Idempotency-Key"] = key or str(uuid.uuid4())
        patience = self._patience if patience is None else patience
        until, attempt = time.monotonic() + patience + takes, 0
        while True:
            attempt += 1
            request = urllib.request.Request(url, data=data, headers=sent, method=method)
            pause = min(5.0, 0.1 * 2**attempt) * random.uniform(0.5, 1.0)
            try:
                limit = max(0.1, min(takes + 15.0, until - time.monotonic()))
                with self._opener.open(request, timeout=limit) as answer:
                    return answer.status, _read(answer.read())
            except urllib.error.HTTPError as error:
                with error:
                    problem = Problem(error.code, _fields(error.read()))
                asked = error.headers.get("Retry-After", "")
                if not _is_temporary(problem):
                    raise problem from None
                pause, cause = max(pause, float(asked) if asked.isdigit() else 0.0), problem
            except (OSError, HTTPException) as error:
                cause = Unreachable(f"{method} {path}: {error}")
            if time.monotonic() + pause > until:
                raise cause from None
            time.sleep(pause)

    # Locks.

    def lock(self, name: str, *, wait: float | None = None, lease: float = 30.0, **mode: Any) -> Lock:
        """A lock, to be held in a ``with`` block. ``wait``: how many seconds to wait for it; without it, for ever.
        ``mode``: ``mode="read"``, ``mode="write"``, or ``mode="semaphore", capacity=3``."""
        return Lock(self, name, wait, lease, mode)

    # Claims.

    def fire(
        self,
        workflow: str,
        step: str,
        entity: str,
        *,
        input: Any = None,
        requester: str | None = None,
        actor: str | None = None,
        key: str | None = None,
        wait: float = 300.0,
    ) -> dict[str, Any]:
        """Fires a step of a claim workflow, and waits for its action. Of several callers, the action runs for one; the
        others get a ``Problem``: ``claimed``, or ``not-permitted``. The same ``key`` asks for the same firing."""
        body = {"workflow": workflow, "step": step, "input": input, "requester": requester, "actor": actor}
        body = {name: value for name, value in body.items() if value is not None}
        key, until = key or str(uuid.uuid4()), time.monotonic() + wait
        while True:
            left = _left(until)
            path, query = f"/claims/{_encoded(entity)}/fire", {"wait": _duration(left)}
            status, fired = self._send("POST", path, body, query=query, key=key, takes=left)
            if status != 202:
                return fired
            if time.monotonic() >= until:
                raise TimeoutError(f"the action for {entity!r} still runs; ask again under the same key {key!r}")
            time.sleep(0.2)

    # Tasks.

    def put_task(self, kind: str, input: Any = None, *, id: str | None = None, **more: Any) -> Task:
        """Puts a task, once for each id. ``more``: ``key``, ``attempts``, ``pause``, ``longest_pause``, ``delay``."""
        body = {"kind": kind, "input": input, **more}
        return Task(self.request("POST", "/tasks", body if id is None else {**body, "id": id}))

    def task(self, id: str, *, wait: float = 0.0) -> Task:
        """Shows a task, and waits at most so long for its end."""
        until = time.monotonic() + wait
        while True:
            left = _left(until)
            query = {"wait": _duration(left)} if wait > 0 else None
            task = Task(self.request("GET", f"/tasks/{_encoded(id)}", query=query, takes=left))
            if task.state not in ("open", "leased") or time.monotonic() >= until:
                return task

    def worker(self, handlers: Mapping[str, Callable[[Task], Any]], **options: Any) -> Worker:
        """A worker that does tasks: a function for each kind."""
        return Worker(self, handlers, **options)


class Lock:
    """A lock that is held while the ``with`` block runs. A thread renews its session."""

    def __init__(
        self, server: Latchwork, name: str, wait: float | None, lease: float, mode: Mapping[str, Any]
    ) -> None:
        self._server, self._name, self._wait, self._lease, self._mode = server, name, wait, lease, dict(mode)
        self._session = ""
        self._ends = threading.Event()
        #: Set as soon as it is known that the lock is lost.
        self.lost = threading.Event()
        #: The fencing token: larger than that of every earlier holder. Receivers can refuse a smaller one.
        self.token = 0

    def __enter__(self) -> Lock:
        asked = time.monotonic()
        begun = self._server.request("POST", "/sessions", {"lease": _duration(self._lease)})
        self._session = begun["id"]
        self._ends.clear()
        self.lost.clear()
        renewal = threading.Thread(target=self._renew, args=(asked,), name=f"lock {self._name}", daemon=True)
        renewal.start()
        try:
            self._acquire()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        was_lost = self.lost.is_set()
        self._end()
        if was_lost and kind is None:
            raise LockLost(f"lock {self._name!r} was lost")

    def check(self) -> None:
        """Raises ``LockLost`` if the lock is known to be lost: before each part of the work."""
        if self.lost.is_set():
            raise LockLost(f"lock {self._name!r} was lost")

    def _acquire(self) -> None:
        until = None if self._wait is None else time.monotonic() + self._wait
        body = {"session": self._session, "request": str(uuid.uuid4()), **self._mode}
        while True:
            left = _LONGEST_WAIT if until is None else _left(until)
            path, query = f"/locks/{_encoded(self._name)}/acquire", {"wait": _duration(left)}
            try:
                standing = self._server.request("POST", path, body, query=query, takes=left)
            except Problem as problem:
                if problem.code == "session-lost":
                    raise LockLost(f"the session ended while it waited for lock {self._name!r}") from problem
                raise
            if standing["granted"]:
                self.token = standing["token"]
                return
            if until is not None and time.monotonic() >= until:
                raise TimeoutError(f"lock {self._name!r} is held by {standing.get('holder')}")

    def _renew(self, confirmed: float) -> None:
        deadline = confirmed + self._lease
        while not self._ends.wait(self._lease / 3):
            asked = time.monotonic()
            try:
                patience = max(0.1, deadline - asked)
                self._server.request("POST", f"/sessions/{self._session}/renew", patience=patience)
                deadline = asked + self._lease
            except Problem as problem:
                if problem.code == "session-lost":
                    self.lost.set()
                    return
            except Unreachable:
                pass
            # No answer has confirmed the lease for its whole length.
            if time.monotonic() >= deadline:
                self.lost.set()

    def _end(self) -> None:
        self._ends.set()
        try:
            self._server.request("DELETE", f"/sessions/{self._session}")
        except (Problem, Unreachable):
            # The session ends with its lease.
            pass


@dataclass(frozen=True)
class Task:
    """A task as the server shows it."""

    fields: dict[str, Any]

    @property
    def id(self) -> str:
        return self.fields["id"]

    @property
    def kind(self) -> str:
        return self.fields["kind"]

    @property
    def input(self) -> Any:
        return self.fields["input"]

    @property
    def key(self) -> str:
        """The idempotency key for receivers: the same for each attempt."""
        return self.fields["key"]

    @property
    def attempt(self) -> int:
        return self.fields["attempt"]

    @property
    def token(self) -> int:
        """The fencing token: larger than that of each earlier worker at this task."""
        return self.fields["token"]

    @property
    def traceparent(self) -> str | None:
        """The W3C trace context of the work, if the server makes traces and has given the task to a worker."""
        return self.fields.get("traceparent")

    @property
    def state(self) -> str:
        return self.fields["state"]

    @property
    def output(self) -> Any:
        return self.fields["output"]


class Worker:
    """Takes tasks by long poll, and does them in threads. A heartbeat keeps the lease of each."""

    def __init__(
        self,
        server: Latchwork,
        handlers: Mapping[str, Callable[[Task], Any]],
        *,
        lease: float = 30.0,
        concurrency: int = 1,
        name: str | None = None,
    ) -> None:
        self._server, self._handlers, self._lease = server, dict(handlers), lease
        self._concurrency, self._name = concurrency, name
        self._stopping = threading.Event()
        self._error: BaseException | None = None

    def stop(self) -> None:
        """Takes no more tasks. ``run`` returns when those that were taken are done."""
        self._stopping.set()

    def run(self) -> None:
        """Works until ``stop`` is called, or until the server refuses the worker."""
        threads = [threading.Thread(target=self._guarded, daemon=True) for _ in range(self._concurrency)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._error is not None:
            raise self._error

    def _guarded(self) -> None:
        try:
            self._loop()
        except BaseException as error:
            self._error = self._error or error
            self.stop()

    def _loop(self) -> None:
        body: dict[str, Any] = {"kinds": sorted(self._handlers), "lease": _duration(self._lease)}
        if self._name is not None:
            body["worker"] = self._name
        while not self._stopping.is_set():
            try:
                # Short enough to notice that it shall stop. Without a key, the wait ends with its connection: a
                # worker that dies must not get another task.
                wait = {"wait": "5s"}
                _, taken = self._server._send("POST", "/tasks:take", body, query=wait, takes=5.0, keyed=False)
            except Unreachable:
                continue
            except Problem as problem:
                if not _is_temporary(problem):
                    raise
                continue
            for fields in taken["tasks"]:
                self._do(Task(fields))

    def _do(self, task: Task) -> None:
        done, path = threading.Event(), f"/tasks/{_encoded(task.id)}"
        beats = threading.Thread(target=self._beat, args=(task, path, done), daemon=True)
        beats.start()
        try:
            verb, told = "complete", {"token": task.token, "output": self._handlers[task.kind](task)}
            json.dumps(told)
        except Failed as failed:
            verb, told = "fail", {"token": task.token, "message": failed.message, "retryable": failed.retryable}
            more = {"code": failed.code, "details": failed.details}
            told |= {name: value for name, value in more.items() if value is not None}
            if failed.pause is not None:
                told["pause"] = _duration(failed.pause)
        except Exception as error:
            verb, told = "fail", {"token": task.token, "message": str(error), "code": type(error).__name__}
        finally:
            done.set()
        try:
            try:
                self._server.request("POST", f"{path}/{verb}", told)
            except Problem as problem:
                if verb == "fail" or _is_lost(problem) or _is_temporary(problem):
                    raise
                # The result is too large, for example. Another attempt would have the same.
                told = {"token": task.token, "message": str(problem), "code": problem.code, "retryable": False}
                self._server.request("POST", f"{path}/fail", told)
        except Problem as problem:
            # Another worker has it, or it was cancelled: what was done here does not count.
            if not (_is_lost(problem) or _is_temporary(problem)):
                raise
        except Unreachable:
            # The lease ends, and another worker does it again under the same idempotency key.
            pass

    def _beat(self, task: Task, path: str, done: threading.Event) -> None:
        while not done.wait(self._lease / 3):
            try:
                told = {"token": task.token}
                self._server.request("POST", f"{path}/heartbeat", told, patience=self._lease / 3)
            except Problem as problem:
                if _is_lost(problem):
                    return
            except Unreachable:
                pass


def verify(body: bytes, headers: Mapping[str, str], secret: str, *, tolerance: float = 300.0) -> None:
    """Checks that a call of an endpoint comes from the server (Standard Webhooks). Raises ``ValueError`` otherwise."""
    given = {name.lower(): value for name, value in headers.items()}
    try:
        id, sent = given["webhook-id"], given["webhook-timestamp"]
        signatures, at = given["webhook-signature"].split(), int(sent)
    except (KeyError, ValueError):
        raise ValueError("the call is not signed") from None
    if abs(time.time() - at) > tolerance:
        raise ValueError("the call is too old, or from the future")
    key = base64.b64decode(secret.removeprefix("whsec_"))
    expected = base64.b64encode(hmac.new(key, f"{id}.{sent}.".encode() + body, hashlib.sha256).digest()).decode()
    if not any(hmac.compare_digest(f"v1,{expected}", signature) for signature in signatures):
        raise ValueError("the signature is wrong")


def _is_lost(problem: Problem) -> bool:
    """True if the worker does not hold the task any more."""
    return problem.code in ("lease-lost", "not-found")


def _is_temporary(problem: Problem) -> bool:
    """True if the same request can succeed later."""
    return problem.status in (408, 429, 502, 503, 504) or problem.code == "idempotency-key-in-use"


def _left(until: float) -> float:
    return max(0.0, min(_LONGEST_WAIT, until - time.monotonic()))


def _duration(seconds: float) -> str:
    return f"{max(0, round(seconds * 1000))}ms"


def _encoded(text: str) -> str:
    encoded = urllib.parse.quote(text, safe="")
    return encoded.replace(".", "%2E") if text in (".", "..") else encoded


def _read(body: bytes) -> Any:
    return json.loads(body) if body else None


def _fields(body: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(body)
    except ValueError:
        return {}
    return fields if isinstance(fields, dict) else {}
