"""Faults of a real run: how they are named, read from the command line, and drawn.

Invariants:

* What the virtual host can do too has the same name here (:class:`trials.faults.FaultKind`).
* A moment is progress of the run, the share of its steps that is recorded, and not time. So a slow machine gets the
  faults of a fast one.

A fault is written ``KIND[:TARGET[>PEER]][@PROGRESS][+SECONDS][=AMOUNT]``: ``kill:engine/0``, ``stop:buffer@0.5+2``,
``drop:scorer>filter=0.3``. What is left out is drawn. ``*`` is any actor. ``learner/1`` is rank 1 of a learner that is
several processes.
"""

from __future__ import annotations

import random
import re
from enum import StrEnum
from typing import TYPE_CHECKING, Final

import msgspec

from penstock.messages.errors import UserFault
from penstock.messages.names import LEARNER, is_engine

if TYPE_CHECKING:
    from collections.abc import Sequence

DRIVER: Final = "driver"
RANK_PREFIX: Final = f"{LEARNER}/"
ANY: Final = "*"


class ChaosKind(StrEnum):
    """What can be done to a real run."""

    KILL = "kill"
    """SIGKILL of an actor or of the driver. A run without a driver is taken up again with ``penstock resume``."""
    STOP = "stop"
    """SIGSTOP, and SIGCONT at its end."""
    CONTINUE = "continue"
    """SIGCONT."""
    SLOW = "slow"
    """Stopped and continued in turn, for shorter than the supervisor takes for death: ``amount`` times as slow, at most
    twice."""
    NOTICE = "notice"
    """SIGTERM of an engine: word that its machine will be taken (``engines.notice_s``); without that key it ends."""
    CUT = "cut"
    """The connections of a link are broken, and new ones too until its end."""
    RESTORE = "restore"
    """The link carries again."""
    DROP = "drop"
    """A share ``amount`` of the frames is lost."""
    DUPLICATE = "duplicate"
    """A share ``amount`` of the frames arrives twice."""
    REORDER = "reorder"
    """A share ``amount`` of the frames is overtaken by the next one."""
    DELAY = "delay"
    """Every frame takes ``amount`` seconds longer."""
    TRUNCATE = "truncate"
    """A share ``amount`` of the frames loses its end; and once the connection breaks in the middle of a message."""
    GARBAGE = "garbage"
    """A share ``amount`` of the frames is followed by noise from a peer with the right keys; and once there is noise
    between the bytes of the connection."""
    REWARD_HANG = "reward_hang"
    """A call of the reward function does not come back."""
    REWARD_THROW = "reward_throw"
    REWARD_NAN = "reward_nan"
    REWARD_EXIT = "reward_exit"
    """It kills its process."""
    DISK_FULL = "disk_full"
    """Nothing more can be written into the run's folder. The run has to stop; it is resumed when there is room."""
    MACHINE = "machine"
    """Every process of the run is gone at once; the run is resumed."""
    NODE_LOSS = "node_loss"
    """A Ray node that is not the driver's goes away, with all its processes."""


PROCESS_FAULTS: Final = frozenset(
    {ChaosKind.KILL, ChaosKind.STOP, ChaosKind.CONTINUE, ChaosKind.SLOW, ChaosKind.NOTICE}
)
LINK_FAULTS: Final = frozenset(
    {
        ChaosKind.CUT,
        ChaosKind.RESTORE,
        ChaosKind.DROP,
        ChaosKind.DUPLICATE,
        ChaosKind.REORDER,
        ChaosKind.DELAY,
        ChaosKind.TRUNCATE,
        ChaosKind.GARBAGE,
    }
)
REWARD_FAULTS: Final = frozenset(
    {ChaosKind.REWARD_HANG, ChaosKind.REWARD_THROW, ChaosKind.REWARD_NAN, ChaosKind.REWARD_EXIT}
)
LASTING: Final = frozenset({ChaosKind.STOP, ChaosKind.SLOW}) | LINK_FAULTS - {ChaosKind.RESTORE}
FIRST_PROGRESS: Final = 0.1
LAST_PROGRESS: Final = 0.8
"""Later the run may be over before the fault comes."""
MARGIN_STEPS: Final = 2
"""That may pass between the last sign of a step and the fault."""
DEFAULT_POOL: Final = ("kill:*", "stop:*")
_SHORT_S: Final = (0.05, 0.35)
"""Of a stop that the supervisor is to forgive."""
_LONG_S: Final = (1.0, 3.0)
_AMOUNTS: Final = {ChaosKind.SLOW: 2.0, ChaosKind.DELAY: 0.05}
_SHARE: Final = 0.3
_FORM: Final = re.compile(
    r"(?P<kind>[a-z_]+)(:(?P<target>[a-z_*]+(/\d+)?)(>(?P<peer>[a-z_*]+(/\d+)?))?)?"
    r"(@(?P<progress>[\d.]+))?(\+(?P<duration_s>[\d.]+))?(=(?P<amount>[\d.]+))?"
)


class ChaosFault(msgspec.Struct, frozen=True, kw_only=True):
    """One fault, and when it comes."""

    kind: ChaosKind
    target: str = ""
    """An actor, or ``driver``; for links the sender. Empty for what concerns the run as a whole."""
    peer: str = ""
    """The other actor that the fault is about; for a fault of a link the receiver."""
    progress: float
    """Share of the steps that are recorded when it comes."""
    delay: float
    """Of a step's usual time, so that it does not always come when a step has just ended."""
    duration_s: float = 0.0
    amount: float = 0.0

    @property
    def actor(self) -> str:
        """Whom a fault of a process is one of: a rank is the learner's."""
        return LEARNER if is_rank(self.target) else self.target

    def __str__(self) -> str:
        link = f"{self.target}>{self.peer}" if self.peer else self.target
        return f"{self.kind}:{link}" if link else str(self.kind)


class _Wanted(msgspec.Struct, frozen=True):
    """What was written; None and ``*`` are drawn."""

    kind: ChaosKind
    target: str
    peer: str
    progress: float | None
    duration_s: float | None
    amount: float | None


def plan_faults(
    texts: Sequence[str],
    *,
    num_faults: int | None,
    seed: int,
    names: Sequence[str],
    num_ranks: int = 1,
    duration_s: float | None = None,
    last_reward: float = LAST_PROGRESS,
) -> tuple[ChaosFault, ...]:
    """The faults of a run, earliest first.

    Args:
        texts: how they were written; none takes any kill and any stop.
        num_faults: how many to draw from ``texts``, each in turn; None takes each of them once.
        seed: of everything that is drawn.
        names: every actor of the run.
        num_ranks: of its learner; a rank is hit only where one is named.
        duration_s: of the lasting ones that do not say so themselves; None draws it.
        last_reward: progress by which those of rewards have to come, see :func:`last_reward_progress`.

    Raises:
        UserFault: one cannot be read, or names nobody.
    """
    rng = random.Random(seed)
    ranks = [f"{RANK_PREFIX}{rank}" for rank in range(num_ranks if num_ranks > 1 else 0)]
    wanted = [_read(text, names, ranks) for text in texts or DEFAULT_POOL]
    if num_faults is not None:
        rng.shuffle(wanted)
        wanted = [wanted[i % len(wanted)] for i in range(num_faults)]
    targets = _Targets(rng, names)
    drawn = [_draw(one, rng, targets, duration_s, last_reward) for one in wanted]
    return tuple(sorted(drawn, key=lambda fault: fault.progress))


def last_reward_progress(num_steps: int, max_staleness: int) -> float:
    """Share of a run's steps after which its last rewards may all have been given: samples are scored as many steps
    before they are trained as they may be old."""
    return min(LAST_PROGRESS, max(0, num_steps - max_staleness - 1 - MARGIN_STEPS) / num_steps)


class _Targets:
    """Draws actors; each of them once before any comes again."""

    def __init__(self, rng: random.Random, names: Sequence[str]) -> None:
        self._rng = rng
        self._engines = [name for name in names if is_engine(name)]
        self._roles = [name for name in names if not is_engine(name)] + [ANY]
        self._left: list[str] = []

    def draw(self) -> str:
        if not self._left:
            self._left = self._rng.sample(self._roles, len(self._roles))
        name = self._left.pop()
        return self._rng.choice(self._engines) if name == ANY else name


def _draw(
    wanted: _Wanted, rng: random.Random, targets: _Targets, duration_s: float | None, last_reward: float
) -> ChaosFault:
    kind = wanted.kind
    lasts_s = wanted.duration_s if wanted.duration_s is not None else duration_s
    drawn_s = rng.uniform(*(_SHORT_S if kind is ChaosKind.STOP and rng.random() < 0.3 else _LONG_S))
    last = last_reward if kind in REWARD_FAULTS else LAST_PROGRESS
    progress = rng.uniform(min(FIRST_PROGRESS, last), last)
    return ChaosFault(
        kind=kind,
        target=targets.draw() if wanted.target == ANY else wanted.target,
        peer=targets.draw() if wanted.peer == ANY else wanted.peer,
        progress=progress if wanted.progress is None else wanted.progress,
        delay=rng.random(),
        duration_s=0.0 if kind not in LASTING else drawn_s if lasts_s is None else lasts_s,
        amount=wanted.amount if wanted.amount is not None else _AMOUNTS.get(kind, _SHARE),
    )


def is_rank(target: str) -> bool:
    """Whether this is a rank of the learner."""
    return target.startswith(RANK_PREFIX)


def rank_of(target: str) -> int:
    """Which one."""
    return int(target.removeprefix(RANK_PREFIX))


def _read(text: str, names: Sequence[str], ranks: Sequence[str]) -> _Wanted:
    found = _FORM.fullmatch(text.strip())
    if found is None:
        raise UserFault(
            f"--faults: cannot read '{text}'; write KIND:TARGET, such as kill:engine/0, stop:buffer@0.5+2 or "
            "drop:scorer>filter=0.3"
        )
    if found["kind"] not in set(ChaosKind):
        raise UserFault(f"--faults: there is no '{found['kind']}'; there are {', '.join(ChaosKind)}")
    kind, target, peer = ChaosKind(found["kind"]), found["target"] or "", found["peer"] or ""
    _check_ends(text, kind, target, peer, (*names, *ranks) if kind in PROCESS_FAULTS else names)
    return _Wanted(
        kind,
        target,
        peer,
        _number(text, found["progress"], at_most=1.0),
        _number(text, found["duration_s"]),
        _number(text, found["amount"], at_most=1.0 if kind in LINK_FAULTS - {ChaosKind.DELAY} else None),
    )


def _check_ends(text: str, kind: ChaosKind, target: str, peer: str, names: Sequence[str]) -> None:
    is_link, is_process = kind in LINK_FAULTS, kind in PROCESS_FAULTS
    if is_link != bool(peer) or (is_link or is_process) != bool(target):
        need = "a sender and a receiver (scorer>filter)" if is_link else "an actor" if is_process else "no target"
        raise UserFault(f"--faults: '{text}': {kind} takes {need}")
    allowed = {*names, ANY} | ({DRIVER} if is_process and kind is not ChaosKind.SLOW else set[str]())
    if kind is ChaosKind.NOTICE:  # to any other SIGTERM is the end
        allowed = {name for name in names if is_engine(name)}
    for end in filter(None, (target, peer)):
        if end not in allowed:
            raise UserFault(f"--faults: '{text}': the run has no '{end}'; it has {', '.join(sorted(allowed))}")
    if target and target == peer != ANY:
        raise UserFault(f"--faults: '{text}': {target} does not send anything to itself")


def _number(text: str, digits: str | None, *, at_most: float | None = None) -> float | None:
    if digits is None:
        return None
    try:
        number = float(digits)
    except ValueError:
        raise UserFault(f"--faults: '{text}': {digits} is not a number") from None
    if at_most is not None and number > at_most:
        raise UserFault(f"--faults: '{text}': {digits} is a share and cannot be above {at_most:g}")
    return number
