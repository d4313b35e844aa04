"""The checks of a function in a process of its own, as a run has it; the process for them is this module too.

Invariants:

* Whatever the function does ends in findings: one that ends its process, or hangs where no signal reaches it, fails the
  check that was under way.
* The process sees the variables of our environment that those of a run see, is in no terminal's reach, and is killed
  with all that it started when the checks are over.

| wait | who ends it |
|---|---|
| for the process to begin | it; after ``START_TIMEOUT_S`` it is killed |
| for a check | it; ``GRACE_S`` past its deadline the process is killed |
"""

from __future__ import annotations

import time
from typing import Final

import msgspec

from penstock.backends.processes.frames import LoadFailed, Ready, frame
from penstock.backends.processes.function_child import line_to_parent
from penstock.backends.processes.function_pool import START_TIMEOUT_S
from penstock.backends.processes.function_process import FunctionProcess
from penstock.runtime.contracts.findings import Begun, Finding

MODULE: Final = "penstock.runtime.contracts.apart"
START: Final = "it begins"
GRACE_S: Final = 5.0
"""For a function that the signal of its deadline reaches late, or that catches it."""
NO_MORE: Final = "; the checks after it were not made"

_SAID: Final[msgspec.msgpack.Decoder[list[Ready | LoadFailed | Begun | Finding]]] = msgspec.msgpack.Decoder(
    list[Ready | LoadFailed | Begun | Finding]
)


class _Asked(msgspec.Struct, frozen=True):
    spec: str
    kind: str
    timeout_s: float
    reward_key: str | None


def check_apart(spec: str, kind: str, *, timeout_s: float, reward_key: str | None = None) -> list[Finding]:
    """As :func:`~penstock.runtime.contracts.kinds.check_function`."""
    given = msgspec.json.encode(_Asked(spec, kind, timeout_s, reward_key)).decode()
    process = FunctionProcess[Begun | Finding](MODULE, given, said=_SAID, has_own_tmp=True, name=spec)
    findings: list[Finding] = []
    check, limit_s, since_s = START, START_TIMEOUT_S, process.started_at_s
    try:
        while process.ready is None:
            if not process.waits(since_s + limit_s + GRACE_S):
                late = f"took longer than {limit_s:g} s, and did not end when it was told to{NO_MORE}"
                return [*findings, Finding(check, "failed", late)]
            for said in process.heard():
                if isinstance(said, Begun):
                    check, limit_s, since_s = said.check, timeout_s, time.monotonic()
                else:
                    findings.append(said)
            if process.is_gone and process.ready is None:
                return [*findings, Finding(check, "failed", f"its process {process.end()}{NO_MORE}")]
        return findings
    finally:
        process.end()


def main() -> None:
    """Arguments: what is asked, as JSON."""
    line, (given,) = line_to_parent()
    asked = msgspec.json.decode(given, type=_Asked)
    from penstock.runtime.contracts.kinds import check_function  # the parent needs nothing of it

    def tell(said: Begun | Finding) -> None:
        line.sendall(frame([said]))

    check_function(asked.spec, asked.kind, timeout_s=asked.timeout_s, reward_key=asked.reward_key, tell=tell)
    line.sendall(frame([Ready()]))


if __name__ == "__main__":
    main()
