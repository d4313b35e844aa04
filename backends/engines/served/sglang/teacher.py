"""A teacher on a stock SGLang server: the log-probs of a prompt, of which nothing is generated.

Invariants:

* Every ``ComputeLogprobs`` is answered by exactly one ``LogprobsComputed``, or the teacher fails: with the reason where
  the sample itself cannot be scored, which touches no other.
* A server of ours that ends, and one that cannot be reached or does not answer in time, ends the teacher with the
  story; its successor starts or reaches one anew.
* A server that runs already is asked and otherwise left alone: nobody knows who else uses it.
* Log-probs of a prompt are of temperature 1, whatever the request says; the scenario's rules see to that.

| waits for | who ends it |
|---|---|
| the server to be ready | the server; ``start_timeout_s`` |
| an answer of the server | the server; ``timeout_s`` |
| a server that is busy, or that no connection can be made to | ``RETRY_S``, then the teacher fails |
| ``close`` for the thread | its own deadline |
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import threading
import time
from typing import TYPE_CHECKING, Final, NamedTuple, assert_never

from penstock.backends.checkpoint.hf_config import HfConfig, read_config
from penstock.backends.engines.options import EnginesOptions
from penstock.backends.engines.served.sglang.control import SglangControl
from penstock.backends.engines.served.sglang.create import shape_of
from penstock.backends.engines.served.sglang.generate import BadTokenError, SglangGenerator
from penstock.backends.engines.served.sglang.http import ConnectFailed, Refused, ServerBusy, SglangError, SglangHttp
from penstock.backends.engines.served.sglang.opening import ADMIN_KEY_VARIABLE, EngineSetup, open_engine
from penstock.messages.arrays import TOKEN_BYTES
from penstock.messages.base import Metric
from penstock.messages.commands import ComputeLogprobs, OpenEngine
from penstock.messages.errors import UserFault
from penstock.messages.local import EngineOpened, LogprobsComputed

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from pathlib import Path

    from penstock.backends.engines.served.sglang.opening import Opened
    from penstock.backends.engines.served.sglang.server import SglangServer
    from penstock.backends.engines.teacher_options import TeacherOptions
    from penstock.backends.protocol import Backend, Emit, Fail
    from penstock.messages.commands import TeacherCommand
    from penstock.messages.teaching import GivenTokens

RETRY_S: Final = 30.0
RETRY_DELAY_S: Final = 0.5
NUM_EXTRA_TOKENS: Final = 8
"""Of context beyond the longest sample: a server takes no prompt that fills all of its own, six less at most."""


class TeacherFailedError(RuntimeError):
    """The server of a teacher cannot be used any more."""


class _Server(NamedTuple):
    """What is asked."""

    http: SglangHttp
    generator: SglangGenerator
    num_slots: int
    opened: Opened | None
    """Of a server of ours."""


def open_sglang_teacher(
    *, name: str, place: int, model_folder: Path, run_folder: Path, options: TeacherOptions, max_context: int
) -> Backend[TeacherCommand]:
    """A teacher on a server for the model in this folder, which is started or reached by its ``OpenEngine``.

    Args:
        name: of the actor; its server's log is named after it.
        place: which teacher it is, counted from 0.
        model_folder: a Hugging Face checkpoint; that of a server which runs already has the same configuration.
        run_folder: for logs.
        options: the ``teacher:`` block.
        max_context: tokens of prompt and response together.

    Raises:
        UserFault: the folder does not say how large the vocabulary is.
    """
    setup = EngineSetup(
        name=name,
        place=place,
        model_folder=model_folder,
        run_folder=run_folder,
        options=EnginesOptions(
            backend="sglang",
            slots=options.slots,
            device=options.device,
            num_threads=options.num_threads,
            sglang=options.sglang,
            start_timeout_s=options.start_timeout_s,
        ),
        max_context=max_context + NUM_EXTRA_TOKENS,
        dtype=options.model.dtype,
    )
    address = options.addresses[place] if options.addresses else None
    return SglangTeacherBackend(setup, options, address=address, vocab_size=shape_of(model_folder).vocab_size)


def longest_sample(model_folder: Path) -> int | None:
    """Tokens of the longest sample that a server of ours can be asked about; None where the model does not say."""
    limit = read_config(model_folder, HfConfig).max_position_embeddings
    return limit - NUM_EXTRA_TOKENS if limit else None


class SglangTeacherBackend:
    """One teacher behind :class:`penstock.backends.protocol.Backend`."""

    def __init__(self, setup: EngineSetup, options: TeacherOptions, *, address: str | None, vocab_size: int) -> None:
        self._setup = setup
        self._options = options
        self._address = address
        self._vocab_size = vocab_size
        self._loop = asyncio.new_event_loop()
        self._stopping = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="sglang-teacher", daemon=True)
        self._tag = secrets.token_hex(4)
        self._server: _Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._has_failed = False
        self._close_s = 0.0
        self._num_tokens = self._num_requests = 0

    def start(self, emit: Emit, fail: Fail) -> None:
        """See :class:`penstock.backends.protocol.Backend`."""
        self._emit, self._tell_failure = emit, fail
        self._thread.start()

    def execute(self, command: TeacherCommand, /) -> None:
        """See :class:`penstock.backends.protocol.Backend`."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: the teacher was given up, or the run has ended
            self._loop.call_soon_threadsafe(self._take, command)

    def gauges(self) -> tuple[Metric, ...]:
        """Samples at the server; tokens that were scored, and requests, since the start."""
        return (
            Metric("teacher/queued", len(self._tasks)),
            Metric("teacher/tokens", self._num_tokens),
            Metric("teacher/passes", self._num_requests),
        )

    def close(self, timeout_s: float) -> None:
        """See :class:`penstock.backends.protocol.Backend`. A server of ours ends with it."""
        deadline_s = time.monotonic() + timeout_s
        if self._thread.ident is None:
            self._loop.close()
            return
        self._close_s = timeout_s
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join(max(0.0, deadline_s - time.monotonic()))

    # --- the thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        except BaseException as error:  # the contract of Backend: the process ends with this story
            self._fail(error)
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        await self._stopping.wait()
        for task in tuple(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(tuple(self._tasks), timeout=1.0)
        server, self._server = self._server, None
        if server is None:
            return
        await server.generator.close()
        if server.opened is not None:
            await server.opened.close(max(1.0, self._close_s - 1.0))
        else:
            await server.http.close()

    def _fail(self, error: BaseException) -> None:
        """Only the first failure is told, and none after the end was asked for."""
        if not (self._has_failed or self._stopping.is_set()):
            self._has_failed = True
            self._tell_failure(error)

    def _take(self, command: TeacherCommand) -> None:
        match command:
            case OpenEngine():
                self._spawn(self._open())
            case ComputeLogprobs():
                self._spawn(self._compute(command))
            case _:
                assert_never(command)

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = self._loop.create_task(self._guarded(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _guarded(self, work: Coroutine[None, None, None]) -> None:
        try:
            await work
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # the contract of Backend: the process ends with this story
            self._fail(error)

    # --- the server -------------------------------------------------------------------------------------------

    async def _open(self) -> None:
        self._server = await (self._launch() if self._address is None else self._attach(self._address))
        self._emit(EngineOpened(num_slots=self._server.num_slots))

    async def _launch(self) -> _Server:
        opened = await open_engine(self._setup, lambda _news: None)
        if opened.server is not None:
            self._spawn(self._watch(opened.server))
        info = opened.endpoints[0].info
        return _Server(
            opened.generation,
            self._generator(opened.generation, incremental=info.incremental_streaming),
            self._options.slots,
            opened,
        )

    async def _watch(self, server: SglangServer) -> None:
        end = await asyncio.shield(server.ended)
        if not end.was_asked:
            raise TeacherFailedError(end.story)

    async def _attach(self, address: str) -> _Server:
        http = SglangHttp(address, admin_api_key=os.environ.get(ADMIN_KEY_VARIABLE, ""))
        try:
            info = await SglangControl(http).server_info()
            wanted = self._setup.max_context - NUM_EXTRA_TOKENS
            if info.max_request_tokens < wanted:
                raise UserFault(
                    f"teacher.addresses: the server at {address} takes prompts of {info.max_request_tokens} tokens, "
                    f"and model.max_context is {wanted}; start it with a larger --context-length"
                )
        except BaseException:
            await http.close()
            raise
        generator = self._generator(http, incremental=info.incremental_streaming)
        return _Server(http, generator, self._options.slots, None)

    def _generator(self, http: SglangHttp, *, incremental: bool) -> SglangGenerator:
        return SglangGenerator(http, vocab_size=self._vocab_size, incremental=incremental)

    # --- questions --------------------------------------------------------------------------------------------

    async def _compute(self, command: ComputeLogprobs) -> None:
        assert self._server is not None, "a teacher is asked after it has opened"
        logprobs: list[bytes] = []
        for index, text in enumerate(command.texts):
            key = command.key
            rid = f"{self._tag}-{key.group_id}-{key.index}-{command.attempt}-{index}"
            try:
                logprobs.append(await self._score(self._server.generator, text, rid))
            except (BadTokenError, Refused) as error:
                self._emit(LogprobsComputed(key=key, attempt=command.attempt, error=str(error)))
                return
        self._num_tokens += sum(text.num_tokens for text in command.texts)
        self._emit(LogprobsComputed(key=command.key, attempt=command.attempt, logprobs=tuple(logprobs)))

    async def _score(self, generator: SglangGenerator, text: GivenTokens, rid: str) -> bytes:
        if not text.context:
            raise BadTokenError("nothing stands before the first token, so nothing predicts it")
        if not text.tokens:
            return b""
        until_s = self._loop.time() + RETRY_S
        number = 0
        while True:
            self._num_requests += 1
            try:
                return await generator.score(
                    text.context + text.tokens,
                    rid=f"{rid}-{number}",
                    extra_key="teacher",
                    timeout_s=self._options.timeout_s,
                    first=len(text.context) // TOKEN_BYTES,
                )
            except (ConnectFailed, ServerBusy) as error:
                if self._loop.time() >= until_s:
                    raise TeacherFailedError(
                        f"the teacher's server has taken nothing for {RETRY_S:g} s: {error}"
                    ) from error
            except (BadTokenError, Refused):
                raise
            except SglangError as error:
                raise TeacherFailedError(f"the teacher's server failed: {error}") from error
            number += 1
            await asyncio.sleep(RETRY_DELAY_S)
