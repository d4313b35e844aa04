"""The parts that are built in, against the suites that a part of another package has to pass."""

from __future__ import annotations

import json
import secrets
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from engine_cases import make_case, random_tokens, reference_canary, weights_of
from learner_cases import learner_plan, train_command

from penstock.backends.checkpoint.make import END_ID, END_TOKEN, character_tokenizer, make_model
from penstock.backends.contracts.engine import EngineContract, EngineSubject
from penstock.backends.contracts.learner import LearnerContract, LearnerSubject
from penstock.backends.contracts.transport import TransportContract, TransportSubject
from penstock.backends.data.options import DataOptions, RecordedOptions
from penstock.backends.data.recorded_rows import RecordedSettings
from penstock.backends.engines.options import EnginesOptions, LatencyOptions, SamplingOptions
from penstock.backends.engines.spec import ENGINES, EngineContext
from penstock.backends.learners.options import LearnerOptions, SimulatedLearnerOptions
from penstock.backends.learners.plan import ExportPlan
from penstock.backends.learners.spec import LEARNERS, LearnerContext
from penstock.backends.simulated.learner import canary_logprobs
from penstock.backends.simulated.timers import ThreadTimers
from penstock.backends.weights.disk import FILE_NAME
from penstock.backends.weights.no_weights import NoWeightsExporter
from penstock.backends.weights.segments import sweep
from penstock.backends.weights.spec import DISK, DISTRIBUTED, SHARED_MEMORY, TENSOR, TRANSPORTS, ExportContext
from penstock.backends.weights.transports import open_exporter
from penstock.messages.arrays import pack_tokens
from penstock.messages.samples import Prompt
from penstock.messages.weights import Canary, WeightManifest

if TYPE_CHECKING:
    from collections.abc import Iterator

CANARY_TOKENS = [4, 9, 2]


def context_of(folder: Path, options: EnginesOptions) -> EngineContext:
    return EngineContext(
        name="engine_worker/0",
        place=0,
        epoch=0,
        model_folder=folder,
        run_folder=folder,
        options=options,
        sampling=SamplingOptions(max_response_tokens=24),
        data=DataOptions(),
        max_context=64,
        dtype="float32",
        seed=0,
        bucket_size_bytes=1 << 20,
    )


def raised(error: BaseException) -> None:
    raise error


class TestTorchEngine(EngineContract):
    @pytest.fixture
    def subject(self, tmp_path: Path) -> EngineSubject:
        case = make_case("qwen3_tied", tmp_path / "model")
        options = EnginesOptions(slots=3, device="cpu", progress_tokens=4)
        exporter = open_exporter(DISK, run_id="contract", learner_epoch=0, folder=tmp_path / "weights")
        canary = reference_canary(case.model, CANARY_TOKENS)
        return EngineSubject(
            spec=ENGINES.spec("torch"),
            context=context_of(case.folder, options),
            export=lambda version, publish: exporter.export(
                weights_of(case.model), version=version, publish=publish, canary=canary
            ),
            prompt=lambda number: Prompt(row=number, epoch=0, tokens=pack_tokens(random_tokens(6, seed=number))),
        )


class TestRecordedEngine(EngineContract):
    @pytest.fixture
    def subject(self, tmp_path: Path) -> EngineSubject:
        character_tokenizer().save(str(tmp_path / "tokenizer.json"))
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": END_TOKEN}))
        rows = tmp_path / "rows.jsonl"
        row = {"prompt": "a=", "response": [[5, END_ID], [6, 7, END_ID]], "reward": [1.0, 0.5]}
        rows.write_text(f"{json.dumps(row)}\n" * 4)
        context = replace(
            context_of(tmp_path, EnginesOptions(slots=3)),
            data=DataOptions(path=str(rows), recorded=RecordedOptions(reward_key="reward")),
            recorded=RecordedSettings(2, 16, are_all_recorded=True, imitates=False),
        )
        return EngineSubject(
            spec=ENGINES.spec("recorded"),
            context=context,
            export=lambda version, publish: NoWeightsExporter(0).export(
                {}, version=version, publish=publish, canary=None
            ),
            prompt=lambda number: Prompt(row=number, epoch=0, tokens=b"", is_recorded=True),
            num_prompts=4,
            samples_per_prompt=2,
        )


class TestSimulatedEngine(EngineContract):
    @pytest.fixture
    def subject(self, tmp_path: Path) -> EngineSubject:
        latency = LatencyOptions(prefill_s=0.001, token_s=0.001, apply_weights_s=0.001, fetch_weights_s=0.001)
        options = EnginesOptions(slots=3, progress_tokens=4, simulated=latency)
        return EngineSubject(
            spec=ENGINES.spec("simulated"),
            context=replace(context_of(tmp_path, options), timers=ThreadTimers(raised)),
            export=simulated_manifest,
            prompt=lambda number: Prompt(row=number, epoch=0, tokens=pack_tokens([number + 2])),
        )


def simulated_manifest(version: int, publish: int) -> WeightManifest:
    tokens, digest = pack_tokens(CANARY_TOKENS), f"{version}-{publish}"
    return WeightManifest(
        version=version,
        publish=publish,
        learner_epoch=0,
        transport="simulated",
        location="",
        size_bytes=0,
        digest=digest,
        canary=Canary(tokens=tokens, logprobs=canary_logprobs(tokens, digest)),
    )


# --- learners -------------------------------------------------------------------------------------------------------


def learner_context(folder: Path, options: LearnerOptions) -> LearnerContext:
    return LearnerContext(
        plan=learner_plan(
            folder / "model",
            folder / "checkpoints",
            options,
            export=ExportPlan(transport=DISK, run_id="contract", folder=str(folder / "weights"), host="127.0.0.1"),
        ),
        log_path=lambda who, number: folder / f"{who}{number}.log",
    )


class TestTorchLearner(LearnerContract):
    @pytest.fixture
    def subject(self, tmp_path: Path) -> LearnerSubject:
        make_model("xs", tmp_path / "model", seed=0)
        context = learner_context(tmp_path, LearnerOptions(device="cpu"))
        return LearnerSubject(spec=LEARNERS.spec("torch"), context=context, train=train_command)


class TestSimulatedLearner(LearnerContract):
    @pytest.fixture
    def subject(self, tmp_path: Path) -> LearnerSubject:
        options = LearnerOptions(simulated=SimulatedLearnerOptions(step_s=0.001, publish_s=0.001))
        context = replace(learner_context(tmp_path, options), timers=ThreadTimers(raised))
        return LearnerSubject(spec=LEARNERS.spec("simulated"), context=context, train=train_command)


# --- transports -----------------------------------------------------------------------------------------------------


class BuiltinTransport(TransportContract):
    name: str
    is_pushed = False

    @pytest.fixture
    def subject(self, tmp_path: Path) -> Iterator[TransportSubject]:
        run_id = f"contract{secrets.token_hex(6)}"
        yield TransportSubject(
            spec=TRANSPORTS.spec(self.name),
            context=ExportContext(run_id=run_id, learner_epoch=1, folder=tmp_path),
            damage=None if self.is_pushed else flip_a_bit,
            outlives=not self.is_pushed,
        )
        sweep(run_id)


class TestSharedMemory(BuiltinTransport):
    name = SHARED_MEMORY


class TestDisk(BuiltinTransport):
    name = DISK


class TestDistributed(BuiltinTransport):
    name = DISTRIBUTED
    is_pushed = True


class TestTensor(BuiltinTransport):
    name = TENSOR
    is_pushed = True


def flip_a_bit(manifest: WeightManifest) -> None:
    path = Path(manifest.location)
    path = path / FILE_NAME if path.is_dir() else path
    data = bytearray(path.read_bytes())
    data[-3] ^= 0x10
    path.write_bytes(data)
