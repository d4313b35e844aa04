"""Records what a real SGLang server answers to ``/generate``, for ``tests/backends/sglang_replies``.

    python tests/sglang/record_replies.py --url http://127.0.0.1:30000 --admin-api-key KEY --model DIR --out FOLDER

The server serves a tiny model; one with ``--incremental-streaming-output`` and one without are recorded, the latter
with ``--max-queued-requests 2``. One file for each case: request, status and body, byte for byte but for times.
"""

from __future__ import annotations

import argparse
import asyncio
import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

import aiohttp
import msgspec

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

TIMES: Final = re.compile(
    rb'"(?:\w+_(?:ts|time|latency|wait)|queue_time|decode_throughput)":[-0-9.e]+,?'
    rb'|"(?:cached_tokens_details|dp_rank)":null,?'
)
PROMPT: Final = [5, 6, 7, 8]
END_TOKENS: Final = list(range(0, 512, 40))


class Recorder:
    """One server and the folder for its answers."""

    def __init__(self, session: aiohttp.ClientSession, out: Path, prefix: str) -> None:
        self.session = session
        self.out = out
        self.prefix = prefix

    async def tell(self, path: str, **body: object) -> None:
        async with self.session.post(path, json=body) as response:
            print(" ", path, body, response.status, (await response.read())[:120])

    async def record(
        self, name: str, *, keep: bool = True, top: dict[str, object] | None = None, **sampling: object
    ) -> bytes:
        defaults = {"max_new_tokens": 12, "temperature": 1.0, "ignore_eos": True, "stream_interval": 4}
        body = {
            "rid": name,
            "input_ids": PROMPT,
            "stream": True,
            "return_logprob": True,
            "extra_key": "v1",
            **(top or {}),
            "sampling_params": {**defaults, **sampling},
        }
        async with self.session.post("/generate", json=body) as response:
            data = await response.read()
        text = TIMES.sub(b"", data).replace(b",}", b"}").decode()
        if keep:
            reply = {"request": body, "status": response.status, "body": text}
            file = self.out / f"{self.prefix}_{name}.json"
            file.write_bytes(msgspec.json.format(msgspec.json.encode(reply), indent=1) + b"\n")
            print(name, response.status, len(text))
        return data

    async def during(self, name: str, act: Callable[[], Awaitable[None]], **sampling: int) -> None:
        """Record a long request in the middle of which something happens."""
        running = asyncio.create_task(self.record(name, keep=True, top=None, **sampling))
        await asyncio.sleep(0.15)
        await act()
        await running


async def record_endings(rec: Recorder) -> None:
    await rec.record("length")
    await rec.record("cached")
    await rec.record("stop_token", ignore_eos=False, max_new_tokens=200, stop_token_ids=END_TOKENS)
    await rec.record("stop_string", max_new_tokens=400, stop=["mm", "ef"])
    await rec.record("whole_answer", top={"stream": False})
    await rec.record(
        "scored", top={"stream": False, "logprob_start_len": 0, "input_ids": [5, 6, 511, 7]}, max_new_tokens=0
    )
    probed: dict[str, object] = {
        "stream": False,
        "logprob_start_len": 0,
        "input_ids": [5, 6, 511],
        "token_ids_logprob": [5, 6, 511],
    }
    await rec.record("probed", top=probed, max_new_tokens=0)


async def record_refusals(rec: Recorder) -> None:
    await rec.record("empty_input", top={"input_ids": []})
    await rec.record("too_long", max_new_tokens=5000)
    await rec.record("bad_temperature", temperature=-1.0)
    await rec.record("unknown_parameter", tempreature=1.0)
    original = asyncio.create_task(rec.record("duplicate", keep=False, max_new_tokens=600, stream_interval=64))
    await asyncio.sleep(0.2)
    await rec.record("duplicate")
    await original


async def record_abort_running(rec: Recorder) -> None:
    async def abort() -> None:
        await rec.tell("/abort_request", rid="abort_running")

    await rec.during("abort_running", abort, max_new_tokens=1500, stream_interval=32)


async def record_aborts(rec: Recorder) -> None:
    await record_abort_running(rec)

    async def abort_queued() -> None:
        await rec.tell("/abort_request", rid="abort_queued")
        await rec.tell("/abort_request", abort_all=True)

    fill = await fill_slots(rec, 16)
    await rec.during("abort_queued", abort_queued)
    await asyncio.gather(*fill)
    await record_abort_retracted(rec)


async def record_abort_retracted(rec: Recorder) -> None:

    async def abort_retracted() -> None:
        await rec.tell("/pause_generation", mode="retract")
        await rec.tell("/abort_request", rid="abort_retracted")
        await rec.tell("/continue_generation")

    await rec.during("abort_retracted", abort_retracted, max_new_tokens=1500, stream_interval=32)


async def fill_slots(rec: Recorder, count: int) -> list[asyncio.Task[bytes]]:
    """Long requests, one by one, so that those which get a slot do not stand in the queue together."""
    tasks: list[asyncio.Task[bytes]] = []
    for i in range(count):
        call = rec.record(f"fill{i}", keep=False, max_new_tokens=1500, stream_interval=64)
        tasks.append(asyncio.create_task(call))
        await asyncio.sleep(0.05)
    return tasks


async def record_update(rec: Recorder, model: str) -> None:
    async def update() -> None:
        await rec.tell("/pause_generation", mode="retract")
        await rec.tell("/update_weights_from_disk", model_path=model, weight_version="v2")
        await rec.tell("/continue_generation")

    await rec.during("updated", update, max_new_tokens=200, stream_interval=64)
    await rec.tell("/update_weight_version", new_version="v1", abort_all_requests=False)


async def record_full_queue(rec: Recorder) -> None:
    fill = await fill_slots(rec, 18)
    await rec.record("full_queue")
    await rec.record("full_queue_whole", top={"stream": False})
    await rec.tell("/abort_request", abort_all=True)
    await asyncio.gather(*fill)


async def record_all(arguments: argparse.Namespace) -> None:
    headers = {"Authorization": f"Bearer {arguments.admin_api_key}"}
    timeout = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(arguments.url, headers=headers, timeout=timeout) as session:
        async with session.get("/server_info") as response:
            info = await response.json()
        is_incremental = info["incremental_streaming_output"]
        rec = Recorder(session, arguments.out, "incremental" if is_incremental else "cumulative")
        await rec.tell("/update_weight_version", new_version="v1", abort_all_requests=False)
        if is_incremental:
            await record_endings(rec)
            await record_aborts(rec)
            await record_update(rec, arguments.model)
            await record_refusals(rec)
        else:
            await rec.record("length")
            await record_abort_running(rec)
            await record_abort_retracted(rec)
            await record_full_queue(rec)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", required=True)
    parser.add_argument("--admin-api-key", required=True)
    parser.add_argument("--model", required=True, help="a checkpoint of the same shape, for the update")
    parser.add_argument("--out", type=Path, required=True)
    asyncio.run(record_all(parser.parse_args()))


if __name__ == "__main__":
    main()
