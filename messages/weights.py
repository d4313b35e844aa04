"""The events that bring new weights to the engines. Full tensors never travel in a message."""

from __future__ import annotations

from typing import Final

from penstock.messages.base import Event, Value
from penstock.messages.training import UpdateMode


class Canary(Value, frozen=True, kw_only=True):
    """A short text, and what the exporting learner says at each place of it."""

    tokens: bytes
    """int32 ids ``[T]``, no id twice."""
    logprobs: bytes
    """float32 ``[T − 1, T]``: of each of the tokens after tokens 0 … t, at temperature 1."""


ADAPTER_DOWN: Final = ".lora_A.weight"
"""What follows the name of an adapted matrix in that of ``A``, its adapter's first matrix; as peft has it."""
ADAPTER_UP: Final = ".lora_B.weight"
"""Likewise of ``B``."""


class LowRank(Value, frozen=True, kw_only=True):
    """What a publish of low-rank adapters is: of each adapted matrix ``W [out, in]`` the tensors ``NAME.lora_A.weight
    [rank, in]`` and ``NAME.lora_B.weight [out, rank]``, which stand for ``W + scale · B · A``."""

    rank: int
    scale: float
    target_modules: tuple[str, ...]
    """Last parts of the names of the adapted matrices, each once."""


class WeightSource(Value, frozen=True, array_like=True):
    """An engine that has the bytes of a publish, or takes them now, and passes them on."""

    engine: str
    epoch: int
    location: str
    """Of what serves them in its process, with the key that lets in whoever was told of it."""


class WeightDetour(Value, frozen=True, array_like=True):
    """Bytes that an engine has taken from the learner, and was to take from another engine."""

    engine: str
    """The other."""
    epoch: int
    """Of the other."""
    cause: str
    is_wrong: bool = False
    """What came of it were other bytes than the learner's."""


class WeightManifest(Value, frozen=True, kw_only=True):
    """Where the weights of one publish lie and how to know that they are whole."""

    version: int
    publish: int
    """Counts the publishes of one learner incarnation; the same version may be published again."""
    learner_epoch: int
    transport: str
    location: str
    """Of the transport: a shared-memory name or a folder."""
    size_bytes: int
    digest: str
    """Of names, shapes, dtypes and bytes of all tensors, in the order of the manifest of the transport."""
    canary: Canary | None = None
    low_rank: LowRank | None = None
    """None: it is the whole model."""
    base: WeightManifest | None = None
    """The model that the adapters belong to, itself whole; there exactly with ``low_rank``."""
    sources: tuple[WeightSource, ...] = ()
    """Who has these bytes besides: of ``n`` the one at place ``i`` is asked for pieces ``i``, ``i + n``, …; an engine
    that is one of them takes those of its own place from the learner, and so does whoever gets no right answer. Empty:
    all comes from the learner."""

    @property
    def base_digest(self) -> str:
        """Of the model beneath the adapters; empty where it is the whole model."""
        return "" if self.base is None else self.base.digest


class WeightsExported(Event, frozen=True, kw_only=True):
    """Learner → WeightPublisher: the newest publish. Repeated when the WeightPublisher was replaced."""

    manifest: WeightManifest
    update_mode: UpdateMode


class WeightsStaged(Event, frozen=True, kw_only=True):
    """WeightPublisher → EngineWorker: fetch these in the background and check the digest."""

    manifest: WeightManifest


class WeightsFetched(Event, frozen=True, kw_only=True):
    """EngineWorker → WeightPublisher: fetched and checked, or why not."""

    engine: str
    engine_epoch: int
    version: int
    publish: int
    digest: str
    """Of what was fetched; empty when the fetch failed."""
    error: str = ""
    detours: tuple[WeightDetour, ...] = ()
    """Sources that did not give what they were asked for."""


class WeightsCommitted(Event, frozen=True, kw_only=True):
    """WeightPublisher → EngineWorker: swap now."""

    version: int
    publish: int
    update_mode: UpdateMode


class WeightsApplied(Event, frozen=True, kw_only=True):
    """EngineWorker → WeightPublisher: what this engine serves now. Also the answer to a commit of something older."""

    engine: str
    engine_epoch: int
    version: int
    """−1: none yet."""
    publish: int
    digest: str
    canary_logprobs: bytes = b""
    """float32 ``[T − 1, T]`` of the manifest's canary under the weights that were loaded."""
    layout: str = ""
    """How the engine lays them out (fused, split over ranks); empty: as they were exported."""
    checksum: str = ""
    """Of what was loaded, in that layout; engines with the same layout and weights have the same."""


class DrainFinished(Event, frozen=True, kw_only=True):
    """EngineWorker → WeightPublisher: idle, the swap begins; the deadline of the commit counts from here."""

    engine: str
    engine_epoch: int
    version: int
    publish: int


class EngineOpening(Event, frozen=True, kw_only=True):
    """EngineWorker → WeightPublisher, where devices are shared with the learner: it is its turn, it opens; the deadline
    of its start counts from here."""

    engine: str
    engine_epoch: int


class EngineReady(Event, frozen=True, kw_only=True):
    """EngineWorker → PromptSource, WeightPublisher: started; takes requests. A teacher tells the Scorer. An engine that
    is lent its devices says so at the start of each of its turns, and takes it back at the end. PromptSource hears it
    again after each swap."""

    engine: str
    engine_epoch: int
    num_slots: int
    """Requests that it works on side by side; 0: the devices are the learner's, so it counts as one that has come and
    serves nothing."""
    version: int = -1
    """Of the weights that it serves, as PromptSource is told; −1: none, or wrong ones."""
    turn: int = 0
    """Of an engine that is lent its devices: the turn that this is said in. In each it begins without weights."""
    passes_on_at: str = ""
    """Location of a :class:`.WeightSource`, where its process passes weights on; empty: it does not."""


class PublishFailed(Event, frozen=True, kw_only=True):
    """WeightPublisher → Learner: an engine loaded this publish and computes something else with it than the Learner
    does. Publish the current version again."""

    version: int
    publish: int
    cause: str


class VersionAnnounced(Event, frozen=True, kw_only=True):
    """WeightPublisher → Buffer, PromptSource, Learner: enough engines serve it."""

    version: int
    publish: int
