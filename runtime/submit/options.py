"""What ``--submit-config`` says: one file for one scheduler, strict as a scenario."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, field

from penstock.messages.base import Options
from penstock.messages.errors import UserFault
from penstock.runtime.hosts.ray.node import BLOCK_PORTS
from penstock.runtime.scenario.keys import dotted, misfit
from penstock.runtime.scenario.source import read_source
from penstock.runtime.submit.scheduler_names import Scheduler

Name = Annotated[str, Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
Line = Annotated[str, Meta(pattern=r"^[^\n]*$")]
Word = Annotated[str, Meta(pattern=r"^[^\s]+$")]
Port = Annotated[int, Meta(ge=1024, le=65535)]


class SubmitOptions(Options, frozen=True, kw_only=True):
    """What all of them take."""

    template: str | None = None
    """A Jinja template to fill in, in place of the one that comes with Penstock; relative to this file."""
    nodes: Annotated[int, Meta(ge=1)] | None = None
    """More than the scenario needs; null: as few as are enough."""
    gpus_per_node: Annotated[int, Meta(ge=1)] | None = None
    """That a node has. null: 8, or fewer where the whole run takes fewer."""
    cpus_per_node: Annotated[int, Meta(ge=1)] | None = None
    """null: one for each thread of a node's processes, and two at least for each GPU."""
    environment: dict[Name, str] = field(default_factory=dict[Name, str])
    """Variables that are set on every node, readable in the script: no secrets."""
    setup: tuple[Line, ...] = ()
    """Lines of shell before everything else on a node, such as ``module load cuda``."""
    start_timeout_s: Annotated[float, Meta(gt=0)] = 600.0
    """All nodes have to have joined Ray by then."""
    poll_s: Annotated[float, Meta(ge=0.2)] = 5.0
    """While the job is followed, the scheduler is asked so often."""


class OwnRayOptions(SubmitOptions, frozen=True, kw_only=True):
    """Where the job starts Ray itself, on machines that others use too."""

    image: Word | None = None
    """Of a container with Penstock in it (``docs/containers.md``)."""
    ports: tuple[Port, Port] = (20000, 31999)
    """First and last port that Ray may use on a node; it takes 256 of them that are free there."""


class SlurmOptions(OwnRayOptions, frozen=True, kw_only=True):
    """Of ``--submit slurm``."""

    partition: Word | None = None
    """null: the cluster's usual one."""
    account: Word | None = None
    """That the time is charged to; null: the user's usual one."""
    qos: Word | None = None
    """Quality of service; null: the usual one."""
    time_limit: Annotated[str, Meta(pattern=r"^[0-9]+(-[0-9]+)?(:[0-9]+){0,2}$")] | None = None
    """As Slurm writes it, such as ``1-12:00:00``; null: the partition's."""
    memory: Word | None = None
    """Of a node, as ``sbatch --mem`` takes it; ``0`` is all. null: what Slurm gives."""
    exclusive: bool = False
    """Nobody else's jobs on the nodes."""
    check_here: bool = True
    """Before it is submitted, this machine is asked for what a dry run asks for: rows, models, functions. false: where
    only the nodes have them."""
    requeue: bool = False
    """At its time limit the job is put into the queue again and goes on by itself. (After a node's failure or a
    preemption Slurm does so where the cluster allows it.)"""
    stop_before_s: Annotated[int, Meta(ge=1)] = 120
    """So long before the time limit the run is stopped, to write a checkpoint."""
    container: Literal["apptainer", "pyxis"] | None = None
    """What runs ``image``."""
    mounts: tuple[Word, ...] = ()
    """Folders that the container sees, ``path`` or ``path:path_inside``, beside that of the run."""
    directives: tuple[Line, ...] = ()
    """Further options of ``sbatch``, such as ``--constraint=h100``."""


class RayJobOptions(SubmitOptions, frozen=True, kw_only=True):
    """Of ``--submit rayjob``."""

    image: Word
    """Of a container with Penstock and ``ray[default]`` in it."""
    volume_claim: Word
    """A persistent volume claim that all pods can write to; runs are written to it."""
    shared_folder: Annotated[str, Meta(pattern=r"^/")]
    """Where it is mounted."""
    namespace: Word | None = None
    """null: that of kubectl's context."""
    service_account: Word | None = None
    """Of the pods; null: the namespace's."""
    image_pull_secrets: tuple[Word, ...] = ()
    """Kubernetes Secrets with which the image is fetched."""
    node_selector: dict[str, str] = field(default_factory=dict[str, str])
    """Labels of the machines that the pods may lie on."""
    tolerate: tuple[Word, ...] = ("nvidia.com/gpu",)
    """Keys of taints that the pods put up with."""
    memory: Word | None = None
    """Of a pod, such as ``512Gi``; null: no request."""
    shm_size: Word = "64Gi"
    """Of ``/dev/shm``, through which weights go to engines of the same node."""
    gpu_resource: Word = "nvidia.com/gpu"
    """What the cluster calls a GPU."""
    secrets: tuple[Word, ...] = ()
    """Kubernetes Secrets whose entries become environment variables."""
    time_limit_s: Annotated[int, Meta(ge=1)] | None = None
    """The job is ended after it, wherever it is."""
    retries: Annotated[int, Meta(ge=0)] = 0
    """So often KubeRay starts the job anew in a new cluster when it fails; it goes on then."""


class SkyPilotOptions(OwnRayOptions, frozen=True, kw_only=True):
    """Of ``--submit skypilot``."""

    shared_folder: Annotated[str, Meta(pattern=r"^/")]
    """On a volume that all nodes share and that outlives them; a bucket will not do, as the ledger needs locks."""
    infra: Word | None = None
    """Cloud, region and zone, such as ``aws/us-east-1``, or ``kubernetes``; null: the cheapest."""
    accelerators: Word | None = None
    """Name of the GPU, such as ``H100``; how many follows from the scenario."""
    use_spot: bool = False
    """Machines that may be taken away: cheaper, and the run goes on when it is launched again."""
    memory: Word | None = None
    """In GB, such as ``256+``."""
    disk_size: Annotated[int, Meta(ge=1)] | None = None
    """In GB."""
    network_tier: Word | None = None
    """``best`` where nodes say much to each other."""
    volumes: dict[str, str] = field(default_factory=dict[str, str])
    """Volumes of SkyPilot by the path where they are mounted."""
    file_mounts: dict[str, str] = field(default_factory=dict[str, str])
    """Local or remote sources by the path where they are put."""
    workdir: str | None = None
    """Local folder that is copied to every node, and where commands run."""
    install: tuple[Line, ...] = ()
    """Lines of shell that install Penstock; not needed with ``image``."""
    secrets: tuple[Name, ...] = ()
    """Environment variables of the login node whose values SkyPilot hands on without showing them."""
    idle_minutes: Annotated[int, Meta(ge=0)] | None = 30
    """The cluster is stopped when it was idle for so long; null: never."""


OPTIONS: dict[Scheduler, type[SubmitOptions]] = {
    Scheduler.SLURM: SlurmOptions,
    Scheduler.RAYJOB: RayJobOptions,
    Scheduler.SKYPILOT: SkyPilotOptions,
}


def read_options(scheduler: Scheduler, file: Path | None) -> SubmitOptions:
    """The options in a file, with ``template`` made absolute; without a file the defaults.

    Raises:
        UserFault: with file, line and key of the first thing that is wrong, or what has to be said.
    """
    kind = OPTIONS[scheduler]
    if file is None:
        if needed := [each.encode_name for each in msgspec.structs.fields(kind) if each.required]:
            raise UserFault(
                f"--submit {scheduler}: a file with the keys {', '.join(needed)} is needed: --submit-config FILE "
                "(docs/clusters.md lists the keys)"
            )
        return kind()
    source = read_source(file, "submit config")
    for key in source.data:
        if key not in kind.__struct_fields__:
            raise UserFault(f"{source.place((key,)).text}: {key}: {_hint(kind, key)}")
    try:
        options = msgspec.convert(source.data, kind, strict=True)
    except msgspec.ValidationError as error:
        path, text = misfit(error, source.data, kind)
        at = path[:-1] if text.startswith("missing") else path
        raise UserFault(f"{source.place(at).text}: {dotted(path)}: {text}") from None
    _check(options, file)
    if options.template is None:
        return options
    return msgspec.structs.replace(options, template=str(file.absolute().parent / Path(options.template).expanduser()))


def _check(options: SubmitOptions, file: Path) -> None:
    """What no single key can know."""
    if isinstance(options, OwnRayOptions) and (options.ports[1] - options.ports[0]) < BLOCK_PORTS - 1:
        first, last = options.ports
        raise UserFault(f"{file}: ports: {first} to {last} are too few: Ray takes {BLOCK_PORTS} on a node")
    if isinstance(options, SlurmOptions) and (options.image is None) != (options.container is None):
        raise UserFault(f"{file}: image and container go together: name both, or neither")


def _hint(kind: type[SubmitOptions], key: str) -> str:
    """Of a key that this scheduler does not have; other schedulers' keys are said to be theirs."""
    others = [name for name, other in OPTIONS.items() if key in other.__struct_fields__]
    if others:
        return f"a key of --submit {' and '.join(others)}, and not of --submit {_name(kind)}"
    if near := difflib.get_close_matches(key, kind.__struct_fields__, n=1):
        return f"no such key; did you mean '{near[0]}'?"
    return f"no such key; the keys of --submit {_name(kind)} are {', '.join(kind.__struct_fields__)}"


def _name(kind: type[SubmitOptions]) -> str:
    return next(name for name, each in OPTIONS.items() if each is kind)
