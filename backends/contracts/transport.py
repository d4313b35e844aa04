"""What learners and engines rely on of every transport of weights; see :mod:`penstock.backends.weights.protocol`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec
import pytest
import torch

from penstock.backends.weights.protocol import BaseExporter, WeightExportError, WeightFetchError
from penstock.backends.weights.spec import ExportContext, TransportSite, TransportSpec
from penstock.messages.arrays import pack_floats, pack_tokens
from penstock.messages.weights import Canary, WeightManifest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from penstock.backends.weights.protocol import WeightExporter

CANARY = Canary(tokens=pack_tokens([1, 2]), logprobs=pack_floats([-0.5, -1.0]))


@dataclass(frozen=True, kw_only=True)
class TransportSubject:
    """The transport that is meant, and the context of its learner's end."""

    spec: TransportSpec
    context: ExportContext
    damage: Callable[[WeightManifest], None] | None = None
    """Changes one bit of what lies there; None: nobody but the learner can reach it."""
    outlives: bool = True
    """What was exported is there when its learner is gone, for the learner that comes after it to release."""

    def open(self, epoch: int) -> WeightExporter:
        """The end of this incarnation of the learner."""
        return self.spec.open_exporter(replace(self.context, learner_epoch=epoch))


class TransportContract:
    """Derive from it, and override ``subject``."""

    @pytest.fixture
    def subject(self) -> TransportSubject:
        """The transport that is meant."""
        raise NotImplementedError("override the fixture 'subject' with the transport that is meant")

    @pytest.fixture
    def exporter(self, subject: TransportSubject) -> Iterator[WeightExporter]:
        """Of a learner's first incarnation."""
        opened = subject.open(1)
        yield opened
        opened.close()

    def test_it_fits_where_it_is_tried(self, subject: TransportSubject) -> None:
        site = TransportSite(size_bytes=1000, num_copies=3, folder=subject.context.folder)
        assert subject.spec.check(site)

    def test_what_is_fetched_is_what_was_exported(self, subject: TransportSubject, exporter: WeightExporter) -> None:
        manifest = exporter.export(_weights(), version=4, publish=2, canary=CANARY)
        assert (manifest.version, manifest.publish, manifest.learner_epoch, manifest.canary) == (4, 2, 1, CANARY)
        sent = msgspec.msgpack.decode(msgspec.msgpack.encode(manifest), type=WeightManifest)
        fetched = subject.spec.fetch(sent)
        _assert_same(fetched.tensors, _weights())
        assert manifest.digest == fetched.digest == fetched.digest_now()

    def test_the_digest_is_that_of_the_weights(self, exporter: WeightExporter) -> None:
        first, again, other = (
            exporter.export(_weights(seed), version=number, publish=number, canary=None)
            for number, seed in enumerate((0, 0, 1))
        )
        assert first.digest == again.digest != other.digest

    def test_tied_tensors_come_out_sharing_their_memory(
        self, subject: TransportSubject, exporter: WeightExporter
    ) -> None:
        table = torch.randn(200, 100)
        manifest = exporter.export({"embed": table, "head": table}, version=0, publish=0, canary=None)
        assert manifest.size_bytes < 1.1 * table.nbytes
        fetched = subject.spec.fetch(manifest).tensors
        assert fetched["embed"].data_ptr() == fetched["head"].data_ptr()
        assert torch.equal(fetched["head"], table)

    def test_later_changes_on_either_side_reach_nobody(
        self, subject: TransportSubject, exporter: WeightExporter
    ) -> None:
        tensors = _weights()
        manifest = exporter.export(tensors, version=0, publish=0, canary=None)
        for tensor in tensors.values():
            tensor.zero_()
        subject.spec.fetch(manifest).tensors["half"].zero_()
        _assert_same(subject.spec.fetch(manifest).tensors, _weights())

    def test_one_flipped_bit_is_caught(self, subject: TransportSubject, exporter: WeightExporter) -> None:
        if subject.damage is None:
            pytest.skip("nobody but the learner can reach it")
        manifest = exporter.export(_weights(), version=0, publish=0, canary=None)
        subject.damage(manifest)
        with pytest.raises(WeightFetchError):
            subject.spec.fetch(manifest)

    def test_a_release_frees_older_versions_and_never_the_newest(
        self, subject: TransportSubject, exporter: WeightExporter
    ) -> None:
        manifests = [exporter.export(_weights(v), version=v, publish=v, canary=None) for v in range(4)]
        exporter.release(below_version=2)
        _assert_same(subject.spec.fetch(manifests[2]).tensors, _weights(2))
        exporter.release(below_version=100)
        for manifest in manifests[:3]:
            with pytest.raises(WeightFetchError):
                subject.spec.fetch(manifest)
        _assert_same(subject.spec.fetch(manifests[3]).tensors, _weights(3))

    def test_what_was_fetched_outlives_its_release(self, subject: TransportSubject, exporter: WeightExporter) -> None:
        fetched = subject.spec.fetch(exporter.export(_weights(0), version=0, publish=0, canary=None))
        exporter.export(_weights(1), version=1, publish=1, canary=None)
        exporter.release(below_version=1)
        _assert_same(fetched.tensors, _weights(0))
        fetched.close()
        fetched.close()
        assert not fetched.tensors

    def test_a_base_stays_while_anything_of_its_learner_does(self, subject: TransportSubject) -> None:
        if not subject.spec.keeps_bases:
            pytest.skip("no adapters are published with it")
        first, second = subject.open(1), subject.open(2)
        assert isinstance(first, BaseExporter)
        assert isinstance(second, BaseExporter)
        old_base = first.export_base(_weights(0), version=0, publish=0)
        old = [first.export(_weights(v), version=v, publish=v, canary=None) for v in range(3)]
        first.release(below_version=100)
        _assert_same(subject.spec.fetch(old_base).tensors, _weights(0))
        _assert_same(subject.spec.fetch(old[2]).tensors, _weights(2))
        base = second.export_base(_weights(0), version=1, publish=3)
        assert (base.digest, base.location != old_base.location) == (old_base.digest, True)
        second.export(_weights(1), version=1, publish=3, canary=None)
        second.release(below_version=1)
        _assert_same(subject.spec.fetch(old_base).tensors, _weights(0))
        second.export(_weights(2), version=2, publish=4, canary=None)
        with pytest.raises(WeightFetchError):
            subject.spec.fetch(old_base)
        _assert_same(subject.spec.fetch(base).tensors, _weights(0))
        second.close()
        with pytest.raises(WeightFetchError):
            subject.spec.fetch(base)

    def test_no_weights_are_no_export(self, exporter: WeightExporter) -> None:
        with pytest.raises(WeightExportError):
            exporter.export({}, version=0, publish=0, canary=None)

    def test_a_successor_keeps_what_it_found_until_it_has_exported_that_version(
        self, subject: TransportSubject, exporter: WeightExporter
    ) -> None:
        if not subject.outlives:
            pytest.skip("what was exported ends with its learner")
        old = exporter.export(_weights(0), version=7, publish=3, canary=None)
        successor = subject.open(2)
        successor.release(below_version=100)
        successor.export(_weights(1), version=6, publish=10, canary=None)
        _assert_same(subject.spec.fetch(old).tensors, _weights(0))
        new = successor.export(_weights(2), version=7, publish=11, canary=None)
        with pytest.raises(WeightFetchError):
            subject.spec.fetch(old)
        _assert_same(subject.spec.fetch(new).tensors, _weights(2))
        successor.close()


def _weights(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    table = torch.randn(7, 5, generator=generator)
    return {
        "model.embed_tokens.weight": table,
        "model.norm.weight": torch.randn(5, generator=generator).to(torch.bfloat16),
        "steps": torch.arange(6, dtype=torch.int64).reshape(2, 3),
        "half": torch.randn(3, 3, generator=generator).to(torch.float16) + 1,
        "empty": torch.empty(0, 4),
        "across": torch.randn(4, 6, generator=generator).t(),
        "lm_head.weight": table,
    }


def _assert_same(got: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    assert set(got) == set(expected)
    for name, tensor in expected.items():
        assert (got[name].dtype, got[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(got[name], tensor), name
