"""Engines of the small server of ``other_server.py``: everything that a second kind of served engine has to say."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final

import msgspec

from penstock.backends.engines.served.base.assembler import Assembler
from penstock.backends.engines.served.base.calls import EndReason
from penstock.backends.engines.served.base.create import served_engine
from penstock.backends.engines.served.base.dialect import Held, Memory
from penstock.backends.engines.served.base.generator import Generator, ScoredText
from penstock.backends.engines.served.base.health import Check
from penstock.backends.engines.served.base.http import ServerHttp
from penstock.backends.engines.served.base.opened import Opened, launch, shape_of
from penstock.backends.engines.served.base.settings import Decoded, LogWords, ServerSettings, Told
from penstock.backends.engines.served.base.staging import stage
from penstock.backends.engines.served.expectation import expect_model
from penstock.backends.engines.spec import EngineSpec
from penstock.backends.protocol import Capability
from penstock.backends.weights.spec import DISK, SHARED_MEMORY
from penstock.backends.weights.tensor_file import tensor_bytes
from penstock.messages.arrays import pack_floats

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    import torch

    from penstock.backends.engines.served.base.calls import Chunk, GenerateCall
    from penstock.backends.engines.served.base.dialect import Loadable
    from penstock.backends.engines.spec import EngineContext, EngineSetup
    from penstock.backends.protocol import Backend
    from penstock.messages.commands import EngineCommand
    from penstock.messages.training import UpdateMode
    from penstock.messages.weights import WeightManifest

ANSWER_S: Final = 20.0
ENDS: Final = {"eos": EndReason.STOP_TOKEN, "length": EndReason.LENGTH, "cancelled": EndReason.ABORTED}


class OtherLog:
    """It says one thing, where it is open, and is ready then."""

    def port_in(self, line: str) -> int | None:
        return int(line.split()[-1]) if line.startswith("open at port") else None

    def says_ready(self, line: str, *, serves: bool) -> bool:
        return serves and line.startswith("open at port")

    def news_in(self, line: str) -> str:
        return line

    def reason_in(self, lines: Sequence[str]) -> str:
        return next((line for line in reversed(lines) if line.startswith("fatal:")), "")

    def tail_of(self, lines: Sequence[str]) -> tuple[str, ...]:
        return tuple(lines)[-10:]

    def passes_in(self, line: str) -> Decoded | Told | None:
        words = line.split()
        return Decoded(int(words[1]), 0, float(words[2])) if words[:1] == ["decoded"] else None


@dataclass(frozen=True, kw_only=True)
class OtherSettings(ServerSettings):
    kind = "Other"
    title_prefix = "other::"
    log_words: ClassVar[LogWords] = OtherLog()

    def command(self, key_path: Path) -> tuple[str, ...]:
        return (str(self.python), str(Path(__file__).with_name("other_server.py")), str(key_path))

    def key_file_text(self) -> str:
        return self.admin_api_key


class Load(msgspec.Struct):
    num_queued: int = msgspec.field(name="queued")
    token_usage: float = msgspec.field(name="cache")
    checksums: dict[str, str] = msgspec.field(name="sums")


class OtherControl:
    questions: ClassVar[Mapping[Check, str]] = {Check.FRONT: "/live", Check.SCHEDULER: "/engine"}

    def __init__(self, http: ServerHttp) -> None:
        self.http = http

    async def ask(self, check: Check, timeout_s: float) -> bool:
        answer = await self.http.call("GET", self.questions[check], timeout_s=timeout_s)
        return bool(msgspec.json.decode(answer).get("halted", False))

    async def try_request(self, rid: str, timeout_s: float) -> None:
        await self.tell("/complete", timeout_s, id=rid, prompt=[0], most=1, ends=[], seed=0)

    async def abort(self, rid: str, timeout_s: float) -> None:
        await self.tell("/cancel", timeout_s, id=rid)

    async def loads(self) -> Load:
        return msgspec.json.decode(await self.http.call("GET", "/engine", timeout_s=ANSWER_S), type=Load)

    async def tell(self, path: str, timeout_s: float, **fields: object) -> bytes:
        return await self.http.call("POST", path, msgspec.json.encode(fields), timeout_s=timeout_s)


@dataclass(frozen=True)
class OtherEndpoint:
    control: OtherControl
    layout: str = "other"

    async def pause(self, mode: UpdateMode, timeout_s: float) -> None:
        await self.control.tell("/halt", timeout_s)

    async def resume(self, timeout_s: float) -> None:
        await self.control.tell("/go", timeout_s)

    async def load_folder(self, folder: Path, label: str, *, flush: bool, timeout_s: float) -> None:
        await self.control.tell("/reload", timeout_s, folder=str(folder), label=label)

    async def forget_adapters(self, used: Collection[str], timeout_s: float) -> None:
        """It has none."""

    async def held(self, tensors: Mapping[str, torch.Tensor], timeout_s: float) -> Held:
        found = (await self.control.loads()).checksums
        wanted = {name: hashlib.sha256(tensor_bytes(tensor)).hexdigest() for name, tensor in tensors.items()}
        return Held(str(sorted(found.items())), [name for name in wanted if found.get(name) != wanted[name]])

    async def sleep(self, timeout_s: float) -> None:
        await self.control.tell("/doze", timeout_s)

    async def wake(self, memory: Memory, timeout_s: float) -> None:
        await self.control.tell("/rise", timeout_s, what=memory.name)

    async def close(self) -> None:
        await self.control.http.close()


class Event(msgspec.Struct):
    ids: list[int] = []
    logprobs: list[float] = msgspec.field(name="lps", default_factory=list[float])
    label: str = msgspec.field(name="by", default="")
    done: str = ""


class OtherAssembler(Assembler):
    def take(self, payload: bytes) -> Chunk | None:
        event, have = msgspec.json.decode(payload, type=Event), self.num_tokens
        self._append(event.ids, event.logprobs, event.label)
        if event.done:
            self._end, self.is_finished = ENDS[event.done], True
        return self._chunk(have, event.label) if event.ids else None


class OtherGenerator(Generator):
    path = "/complete"

    def _encoded(self, call: GenerateCall) -> bytes:
        ids, ends = self._checked(call.input_ids), call.stop_token_ids
        asked = {"id": call.rid, "prompt": ids, "most": call.max_new_tokens, "ends": ends, "seed": call.seed}
        return msgspec.json.encode(asked)

    def _assembler(self, call: GenerateCall) -> Assembler:
        return OtherAssembler(vocab_size=self._vocab_size)

    async def _rows(self, tokens: bytes, timeout_s: float) -> list[list[float]]:
        body = msgspec.json.encode({"ids": self._checked(tokens)})
        answer = await self.http.call("POST", "/rows", body, timeout_s=timeout_s)
        return msgspec.convert(msgspec.json.decode(answer)["rows"], list[list[float]])

    async def score(
        self, tokens: bytes, *, rid: str, extra_key: str, timeout_s: float, first: int = 1, num_top: int = 0
    ) -> ScoredText:
        rows = await self._rows(tokens, timeout_s)
        return ScoredText(pack_floats([row[place + 1] for place, row in enumerate(rows)][first - 1 :]))

    async def probe(self, tokens: bytes, *, rid: str, extra_key: str, timeout_s: float, adapter: str = "") -> bytes:
        return pack_floats([logprob for row in await self._rows(tokens, timeout_s) for logprob in row])


class OtherStaging:
    """Of files alone."""

    def __init__(self, context: EngineContext) -> None:
        self._model_folder = context.model_folder
        self._folder = context.run_folder / "staged"
        self._expected = expect_model(context.model_folder)

    async def stage(self, manifest: WeightManifest) -> Loadable[OtherEndpoint]:
        model, folder, expected = self._model_folder, self._folder, self._expected
        return await asyncio.to_thread(stage, manifest, model_folder=model, folder=folder, expected=expected)

    async def close(self) -> None:
        """Nothing is held."""


async def open_server(setup: EngineSetup, report: Callable[[str], None]) -> Opened[OtherEndpoint]:
    settings = OtherSettings(
        python=Path(sys.executable),
        model_folder=setup.model_folder,
        options=(),
        admin_api_key=secrets.token_hex(8),
        log_path=setup.log_path("other"),
        start_timeout_s=setup.options.start_timeout_s,
        owner=f"{setup.name} of {setup.run_folder}",
    )
    server = await launch(settings, None, report)
    http = ServerHttp(server.address, admin_api_key=settings.admin_api_key)
    control = OtherControl(http)
    generator = OtherGenerator(http, vocab_size=shape_of(setup.model_folder).vocab_size, abort_at=[control])
    return Opened(
        endpoints=(OtherEndpoint(control),),
        generator=generator,
        scorers=(generator,),
        num_slots=setup.options.slots,
        is_seeded=True,
        server=server,
        passes_per_line=1,
    )


def open_other(context: EngineContext) -> Backend[EngineCommand]:
    return served_engine(context, open_server, OtherStaging(context))


OTHER: Final[EngineSpec] = EngineSpec(
    open=open_other,
    capabilities=frozenset(
        {
            Capability.IN_FLIGHT,
            Capability.INTERRUPT,
            Capability.RETRACT,
            Capability.CANARY,
            Capability.GENERATES,
            Capability.HOLDS_WEIGHTS,
            Capability.SEEDED_SAMPLING,
        }
    ),
    transports=(DISK, SHARED_MEMORY),
)
