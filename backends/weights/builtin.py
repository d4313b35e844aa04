"""The transports that are built in: whether each fits, and its two ends, which import what they run on when opened."""

from __future__ import annotations

import ipaddress
import os
import tempfile
from functools import partial
from typing import TYPE_CHECKING, Final, Literal
from urllib.parse import urlsplit

import psutil

from penstock.backends.weights import spec
from penstock.backends.weights.no_weights import NoWeightsExporter
from penstock.backends.weights.protocol import WeightFetchError
from penstock.backends.weights.spec import ExportContext, TransportSite, TransportSpec
from penstock.messages.errors import UserFault

if TYPE_CHECKING:
    from penstock.backends.weights.protocol import FetchedWeights, WeightExporter
    from penstock.messages.weights import WeightManifest


def in_units(size_bytes: int) -> str:
    """A size for people, in powers of 1000."""
    size, unit = float(size_bytes), "bytes"
    for larger in ("kB", "MB", "GB", "TB"):
        if size < 1000:
            break
        size, unit = size / 1000, larger
    return f"{size:.0f} {unit}" if unit == "bytes" or size >= 100 else f"{size:.1f} {unit}"


def check_loopback(url: str) -> None:
    """Raise unless the server is on this machine: it unpickles what it gets, and a handle means nothing elsewhere.

    Raises:
        UserFault: it is not.
    """
    if not _is_loopback(url):
        raise UserFault(
            f"weights.transport is tensor, and the server at {url} is not on the loopback of the learner's "
            "machine; set weights.transport: distributed, or disk"
        )


def _elsewhere(site: TransportSite) -> str:
    """A server that runs on another machine; empty when none does."""
    return next((address for address in site.addresses if not _is_loopback(address)), "")


def _is_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _need(site: TransportSite) -> tuple[int, str]:
    need_bytes = site.size_bytes * site.num_copies
    each = in_units(site.size_bytes)
    return need_bytes, f"{site.num_copies} copies of the weights need {in_units(need_bytes)} ({each} each)"


def _check_memory(transport: str, site: TransportSite) -> str:
    if transport == spec.TENSOR:
        for address in site.addresses:
            check_loopback(address)
    if transport == spec.NETWORK and (address := _elsewhere(site)):
        raise UserFault(
            f"weights.transport is network, which lands in the memory of an EngineWorker, and the server at {address} "
            "is on another machine and cannot read it; set weights.transport: distributed, or disk"
        )
    need_bytes, need = _need(site)
    free_bytes = psutil.virtual_memory().available
    if free_bytes < need_bytes:
        raise UserFault(
            f"weights.transport is {transport}, which keeps the weights in the learner's process: {need}, and this "
            f"machine has {in_units(free_bytes)} of memory free; set weights.transport: disk"
        )
    return f"this machine has {in_units(free_bytes)} of memory free, and {need}"


def _check_shared(site: TransportSite) -> str:
    problem, found = _shared_problem(site)
    if not problem:
        return found
    if not site.is_asked:
        raise UserFault(problem)
    size_gib = -(-_need(site)[0] // (1 << 30))
    fix = "Set" if _elsewhere(site) else f"Give the machine more (docker run --shm-size={size_gib}g), or set"
    raise UserFault(f"weights.transport is shared_memory, but {problem}. {fix} weights.transport: disk")


def _shared_problem(site: TransportSite) -> tuple[str, str]:
    """Why it cannot be used, or an empty text and what there is."""
    folder, (need_bytes, need) = site.shared_folder, _need(site)
    if elsewhere := _elsewhere(site):
        return f"the server at {elsewhere} is on another machine and cannot read shared memory", ""
    if site.may_be_elsewhere and not site.is_asked:
        return "Ray may put engines on another machine than the learner, where its shared memory cannot be read", ""
    if not folder.is_dir():
        return f"there is no {folder} on this machine, and {need}", ""
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        return f"{folder} is not writable for this user", ""
    free = os.statvfs(folder)
    free_bytes = free.f_bavail * free.f_frsize
    if free_bytes < need_bytes:
        total_bytes = free.f_blocks * free.f_frsize
        return f"{folder} has {in_units(free_bytes)} free of {in_units(total_bytes)}, and {need}", ""
    return "", f"{folder} has {in_units(free_bytes)} free, and {need}"


def _check_disk(site: TransportSite) -> str:
    folder, (need_bytes, need) = site.folder, _need(site)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".probe-") as probe:
            probe.write(b"penstock")
        free = os.statvfs(folder)
    except OSError as error:
        raise UserFault(
            f"weights cannot be written to {folder} ({error.strerror}); set run.folder to a folder you can write to"
        ) from None
    free_bytes = free.f_bavail * free.f_frsize
    if free_bytes < need_bytes:
        raise UserFault(
            f"the disk of {folder} has {in_units(free_bytes)} free, and {need}; free some, or set run.folder to a "
            "folder on a larger disk"
        )
    return f"the disk of {folder} has {in_units(free_bytes)} free, and {need}"


# --- the two ends -------------------------------------------------------------------------------------------------


def _share(context: ExportContext) -> WeightExporter:
    from penstock.backends.weights.shared_memory import SharedMemoryExporter

    return SharedMemoryExporter(context.run_id, context.learner_epoch)


def _fetch_shared(manifest: WeightManifest) -> FetchedWeights:
    from penstock.backends.weights.shared_memory import fetch_shared_memory

    return fetch_shared_memory(manifest)


def _write(context: ExportContext) -> WeightExporter:
    from penstock.backends.weights.disk import DiskExporter

    return DiskExporter(context.folder, context.learner_epoch)


def _fetch_disk(manifest: WeightManifest) -> FetchedWeights:
    from penstock.backends.weights.disk import fetch_disk

    return fetch_disk(manifest)


def _push(transport: Literal["distributed", "tensor", "network"], context: ExportContext) -> WeightExporter:
    from penstock.backends.weights.pushing import PushExporter

    return PushExporter(transport, context.learner_epoch, context.host)


def _pull(manifest: WeightManifest) -> FetchedWeights:
    from penstock.backends.weights.pulled import fetch_pushed

    return fetch_pushed(manifest)


def _land(manifest: WeightManifest) -> FetchedWeights:
    from penstock.backends.weights.network import LANDING

    return LANDING.fetch(manifest)


def _fetch_nothing(manifest: WeightManifest) -> FetchedWeights:
    raise WeightFetchError(f"the run publishes no weights, and version {manifest.version} was to be fetched")


SHARED_MEMORY: Final = TransportSpec(open_exporter=_share, fetch=_fetch_shared, check=_check_shared, keeps_bases=True)
DISK: Final = TransportSpec(open_exporter=_write, fetch=_fetch_disk, check=_check_disk, keeps_bases=True)
DISTRIBUTED: Final = TransportSpec(
    open_exporter=partial(_push, spec.DISTRIBUTED),
    fetch=_pull,
    check=partial(_check_memory, spec.DISTRIBUTED),
    shares_gpus=False,
)
TENSOR: Final = TransportSpec(
    open_exporter=partial(_push, spec.TENSOR), fetch=_pull, check=partial(_check_memory, spec.TENSOR)
)
NETWORK: Final = TransportSpec(
    open_exporter=partial(_push, spec.NETWORK),
    fetch=_land,
    check=partial(_check_memory, spec.NETWORK),
    shares_gpus=False,
)
NONE: Final = TransportSpec(
    open_exporter=lambda context: NoWeightsExporter(context.learner_epoch), fetch=_fetch_nothing, is_chosen=False
)
