"""The ``run:``, ``runtime:`` and ``observability:`` blocks of a scenario."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, field

from penstock.messages.base import Options, OptionValue
from penstock.messages.option_keys import FileKey, TrackerKey

Seconds = Annotated[float, Meta(gt=0)]


class RunOptions(Options, frozen=True, kw_only=True):
    """What is run and where it is written."""

    name: str
    """Begins the name of the run's folder, and heads the report."""
    seed: int = 0
    """Of everything drawn at random: the order of prompts, the samples' own seeds, weights that are made. Another one
    shows how much of a difference is chance."""
    num_steps: Annotated[int, Meta(ge=1)] = 100
    """Batches to train."""
    folder: str = "runs"
    """Runs are written to ``folder/name-<time>``."""
    keep_samples: bool = False
    """Write trained samples to ``samples/*.parquet`` in the run's folder before the ledger drops them."""
    only: Literal["learner", "rollout", "evaluate"] | None = None
    """``learner``: train the batches that another run has recorded (``batches_from``), without engines. ``rollout``:
    generate, score and filter with the model as it is, train nothing, and keep the groups. ``evaluate``: evaluate the
    model as it is, once, on ``evaluation.datasets``. As ``penstock run --only``. null: everything."""
    batches_from: FileKey | None = None
    """Folder of the run whose batches ``only: learner`` trains, in its order. As ``penstock run --from``."""
    num_groups: Annotated[int, Meta(ge=1)] | None = None
    """Groups that ``only: rollout`` collects; null: ``num_steps`` times ``learner.groups_per_batch``. As ``penstock run
    --num-groups``."""


class RuntimeOptions(Options, frozen=True, kw_only=True):
    """Where the actors' processes live, and how they are watched."""

    host: Literal["ray", "local"] = "ray"
    """``ray``: Ray starts the actors, on this machine or on a cluster. ``local``: they are forked from one warm process
    on this machine, which is quicker; for tests, notebooks and quick trials."""
    ray_address: str | None = None
    """null: Ray is started embedded and ends with the run."""
    gpu_memory_gb: Annotated[float, Meta(ge=1)] | None = None
    """Memory of each GPU that the run gets, in 10⁹ bytes: 80 for an H100. `--dry-run` compares with it what a rank of
    the learner and an engine need, and fails where that is more; `--gpu-memory` goes before. null: it compares with
    80 GB and only says so."""
    encrypt: bool = True
    """CURVE on every socket, with keys made for the run."""
    heartbeat_s: Seconds = 1.0
    """Between two signs of life of an actor's process."""
    heartbeat_timeout_s: Seconds = 10.0
    """An actor that was not heard for so long is replaced (a stopped process is noticed at once). One whose start took
    long is waited for longer, as its replacement costs more: a tenth of what it took, and a minute at most."""
    max_restarts: Annotated[int, Meta(ge=0)] = 10
    """Of one actor within ten minutes; past it the run stops with its story, or goes on without it if it is an engine
    and ``engines.min`` others are left."""
    resend_after_s: Seconds = 5.0
    """What is not settled by then is sent again, then after twice the time, and so on."""
    settle_delay_s: Seconds = 0.1
    """Settlements are collected for this long before they are told."""
    stop_timeout_s: Seconds = 30.0
    """After SIGTERM or Ctrl-C a checkpoint is written first; it may take so long. A second signal ends at once."""
    simulated_cores: Annotated[float, Meta(gt=0)] | None = None
    """Of a simulation: cores of the one machine that all engines and the learner are on. Where they want more
    (``engines.simulated.cores``, ``learner.simulated.cores``), all of them are slower. null: each has its own."""
    simulated_hop_s: Annotated[float, Meta(ge=0)] | None = None
    """Of a simulation: mean time from when an actor has said something until another handles it, drawn evenly from
    three to five quarters of it. null: 0.2 to 1 ms."""
    overdue_after_s: Seconds = 120.0
    """A wait that has lasted so long is reported, with who waits for whom."""
    pass_env: tuple[Annotated[str, Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")], ...] = ()
    """Names of environment variables that processes with your functions see: rewards, filters, hooks, tools, episodes.
    They get no others but what Python and its libraries need to run, and the ``auth_env`` of a service that a reward
    asks."""


class TrackerOptions(Options, frozen=True, kw_only=True):
    """A tracker of experiments, which is told how the run goes."""

    name: TrackerKey
    """``tensorboard``, ``wandb`` or ``mlflow``, each with an extra of Penstock of that name; the name that an installed
    package brings; or a class of yours, ``file.py:Class``. Each once."""
    options: dict[str, OptionValue] = field(default_factory=dict[str, OptionValue])
    """What the tracker takes: ``docs/observability.md`` lists it for those that are built in."""
    samples: Annotated[int, Meta(ge=0, le=1000)] = 8
    """It is shown the newest so many of the samples that are kept; 0: none."""
    samples_every: Annotated[int, Meta(ge=1)] = 10
    """Steps from one showing to the next; the last is at the end of the run."""
    timeout_s: Seconds = 30.0
    """At the end of the run it is waited for, so long at most; then its process is ended."""


class ObservabilityOptions(Options, frozen=True, kw_only=True):
    """Traces, metrics, report."""

    tracing: bool = True
    """Write the life of the samples of `trace_fraction` of the groups as spans to ``traces/`` in the run's folder."""
    trace_fraction: Annotated[float, Meta(ge=0, le=1)] = 0.1
    """Share of the groups whose samples are traced, all of them. A traced sample writes about 0.8 kB."""
    otlp_endpoint: str | None = None
    """Send spans to this OTLP/HTTP endpoint as well as to the run's folder."""
    metrics_port: Annotated[int, Meta(ge=0, le=65535)] | None = None
    """Serve ``/metrics`` here; 0 takes a free port, null serves none."""
    metrics_host: str = "127.0.0.1"
    """Address that ``/metrics`` listens on. Any that other machines can reach needs the token in ``metrics.token``."""
    max_disk_gb: Annotated[float, Meta(gt=0)] | None = 20.0
    """What events, spans, logs and the time accounting of a run may take of the disk, in 10⁹ bytes. Events and spans
    are compressed as they grow old, and the oldest removed when this is reached, which is told; null: all are kept, as
    they were written."""
    record: bool = False
    """Write what every actor handles and asks for to ``recording/`` in the run's folder, whole, so that ``penstock
    replay`` can go through it again. It takes up to half of `max_disk_gb`, and ends there."""
    report: bool = True
    """Write ``report.html`` at the end of a run."""
    samples: Annotated[int, Meta(ge=0, le=1_000_000)] = 1000
    """Keep the newest so many samples, whatever becomes of them, for ``penstock samples`` and the report: prompt,
    response, reward, cause and reason; and a tenth as many each of the newest failed, of the worst and of the longest.
    0 keeps none. Every trained sample is kept with ``run.keep_samples``."""
    trackers: tuple[TrackerOptions, ...] = ()
    """Trackers of experiments beside ``metrics.jsonl``, which is always written. One that fails or hangs costs the run
    its own lines only."""
    show_samples: bool = True
    """Show one of them on the terminal every minute. As ``penstock run --quiet``."""
