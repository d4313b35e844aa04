"""The suites that come with Penstock, on the parts of this package."""

# pyright: reportUnknownVariableType=false
# safetensors leaves parts of its types open.

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from bigram_parts.spec import BIGRAM, SCRATCH
from safetensors.torch import load_file

from penstock.backends.checkpoint.make import make_model
from penstock.backends.contracts.engine import EngineContract, EngineSubject
from penstock.backends.contracts.transport import TransportContract, TransportSubject
from penstock.backends.data.options import DataOptions
from penstock.backends.engines.options import EnginesOptions, SamplingOptions
from penstock.backends.engines.spec import EngineContext
from penstock.backends.weights.spec import ExportContext
from penstock.backends.weights.transports import open_exporter
from penstock.messages.arrays import pack_tokens
from penstock.messages.samples import Prompt

if TYPE_CHECKING:
    from penstock.messages.weights import WeightManifest


class TestBigram(EngineContract):
    @pytest.fixture
    def subject(self, tmp_path: Path) -> EngineSubject:
        model = tmp_path / "model"
        make_model("xs", model, seed=0)
        weights = load_file(model / "model.safetensors")
        exporter = open_exporter("disk", run_id="check", learner_epoch=0, folder=tmp_path / "weights")
        context = EngineContext(
            name="engine_worker/0",
            place=0,
            epoch=0,
            model_folder=model,
            run_folder=tmp_path,
            options=EnginesOptions(backend="bigram", slots=3, progress_tokens=4, options={"smoothing": 0.1}),
            sampling=SamplingOptions(max_response_tokens=24),
            data=DataOptions(),
            max_context=64,
            dtype="float32",
            seed=0,
            bucket_size_bytes=1 << 20,
        )
        return EngineSubject(
            spec=BIGRAM,
            context=context,
            export=lambda version, publish: exporter.export(weights, version=version, publish=publish, canary=None),
            prompt=lambda number: Prompt(row=number, epoch=0, tokens=pack_tokens([5, 7 + number % 8])),
        )


class TestScratch(TransportContract):
    @pytest.fixture
    def subject(self, tmp_path: Path) -> TransportSubject:
        options = {"folder": str(tmp_path / "scratch")}
        context = ExportContext(run_id="check", learner_epoch=1, folder=tmp_path, options=options)
        return TransportSubject(spec=SCRATCH, context=context, damage=flip_a_bit)


def flip_a_bit(manifest: WeightManifest) -> None:
    path = Path(manifest.location, "model.safetensors")
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
