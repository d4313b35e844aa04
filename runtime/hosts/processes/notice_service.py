"""Asks a cloud, or an address of the user's own, whether this machine will be taken.

Clouds tell it to whoever asks, at an address that each of their machines has: AWS to an instance of the spot market,
GCP to a preemptible one, Azure among its scheduled events, which are those of other machines as well.

Invariants:

* Nothing is asked on the thread of an actor. Word is heard once, and then nothing more is asked.
* What answers is untrusted: an answer that is none is a warning, the first time and when it changes, and no word. It
  sends nobody elsewhere: the page that a proxy or a login sends to has status 200 too, and headers hold a token.
* Machines ask their cloud directly, whatever proxies the environment names.

| wait | who ends it |
|---|---|
| for each piece of an answer | ``ANSWER_TIMEOUT_S`` |
| until the next question | ``close``, or ``ASK_EVERY_S`` |
"""

from __future__ import annotations

import http.client
import logging
import os
import threading
import time
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from penstock.messages.base import UNREADABLE

if TYPE_CHECKING:
    from collections.abc import Callable

ASK_EVERY_S: Final = 2.0
ANSWER_TIMEOUT_S: Final = 2.0
MAX_ANSWER_BYTES: Final = 1 << 18
METADATA: Final = "http://169.254.169.254"
"""Of the machine itself, on AWS and Azure."""
NO_WORD: Final = frozenset((204, 404, 410))
"""Status of an answer that there is none."""

_log = logging.getLogger(__name__)
HANDLERS: Final = (
    urllib.request.HTTPHandler,
    urllib.request.HTTPSHandler,
    urllib.request.HTTPErrorProcessor,
    urllib.request.HTTPDefaultErrorHandler,
    urllib.request.UnknownHandler,
)
"""Of what urllib has: none for proxies, redirections, files."""


class NoticeServiceError(RuntimeError):
    """What answers is not what was expected."""


class _AzureEvent(msgspec.Struct, rename="pascal"):
    event_type: str = ""
    resources: list[str] = []


class _AzureEvents(msgspec.Struct, rename="pascal"):
    events: list[_AzureEvent] = []


class _Answer(NamedTuple):
    status: int
    body: bytes


def _is_taken_by_aws() -> bool:
    base = os.environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT", METADATA).rstrip("/")
    token = _asked(f"{base}/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": "60"}, method="PUT")
    if token.status != 200:
        raise NoticeServiceError(f"it gives no session token (HTTP {token.status})")
    headers = {"X-aws-ec2-metadata-token": token.body.decode("latin-1").strip()}
    return _is_word(_asked(f"{base}/latest/meta-data/spot/instance-action", headers))


def _is_taken_by_gcp() -> bool:
    host = os.environ.get("GCE_METADATA_HOST", "metadata.google.internal")
    answer = _asked(f"http://{host}/computeMetadata/v1/instance/preempted", {"Metadata-Flavor": "Google"})
    return _is_word(answer) and answer.body.strip().upper() == b"TRUE"


def _is_taken_by_azure() -> bool:
    headers = {"Metadata": "true"}
    name = _asked(f"{METADATA}/metadata/instance/compute/name?api-version=2021-02-01&format=text", headers)
    events = _asked(f"{METADATA}/metadata/scheduledevents?api-version=2020-07-01", headers)
    if not _is_word(events):
        return False
    try:
        found = msgspec.json.decode(events.body, type=_AzureEvents)
    except UNREADABLE as error:
        raise NoticeServiceError(f"its scheduled events cannot be read: {error}") from error
    own = name.body.decode("utf-8", "replace").strip()
    return any(event.event_type == "Preempt" and own in event.resources for event in found.events)


CLOUDS: Final[dict[str, Callable[[], bool]]] = {
    "aws": _is_taken_by_aws,
    "azure": _is_taken_by_azure,
    "gcp": _is_taken_by_gcp,
}


def is_taken(url: str) -> bool:
    """Whether this machine will be taken, as a cloud says, or an address by an answer of status 200.

    Raises:
        NoticeServiceError: it answers something else, or nothing.
    """
    ask = CLOUDS.get(url)
    try:
        return _is_word(_asked(url, {})) if ask is None else ask()
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise NoticeServiceError(f"it does not answer ({error})") from error


class NoticeService:
    """Asks from a thread of its own, until there is word."""

    def __init__(self, url: str, wake: Callable[[], None]) -> None:
        """
        Args:
            url: see :func:`is_taken`.
            wake: called from that thread, when there is word.
        """
        self.url = url
        self.heard_s: float | None = None
        """When there was word, on the monotonic clock."""
        self._wake = wake
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="machine-notice", daemon=True)

    def start(self) -> None:
        """Begin to ask."""
        self._thread.start()

    def close(self) -> None:
        """Ask no more; an answer that is still awaited is not waited for."""
        self._stop.set()

    def _run(self) -> None:
        told = ""
        while not self._stop.is_set():
            try:
                if is_taken(self.url):
                    self.heard_s = time.monotonic()
                    self._wake()
                    return
                found = ""
            except NoticeServiceError as error:
                found = str(error)
            if found and found != told:
                _log.warning(
                    "engines.notice_url: whether this machine will be taken is not known, as %s was asked and %s; "
                    "it is asked again every %g s",
                    self.url, found, ASK_EVERY_S,
                )  # fmt: skip
            told = found or told
            self._stop.wait(ASK_EVERY_S)


def _asked(url: str, headers: dict[str, str], method: str = "GET") -> _Answer:
    request = urllib.request.Request(url, headers=headers, method=method)
    direct = urllib.request.OpenerDirector()
    for handler in HANDLERS:
        direct.add_handler(handler())
    try:
        with direct.open(request, timeout=ANSWER_TIMEOUT_S) as reply:
            return _Answer(reply.status, reply.read(MAX_ANSWER_BYTES))
    except urllib.error.HTTPError as error:
        with error:
            return _Answer(error.code, b"")


def _is_word(answer: _Answer) -> bool:
    if answer.status == 200:
        return True
    if answer.status in NO_WORD:
        return False
    raise NoticeServiceError(f"it answered with HTTP {answer.status}")
