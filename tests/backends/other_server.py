"""A small server for inference in a dialect of its own, run as ``python other_server.py KEY_FILE``.

It draws each token evenly from its vocabulary, by the request's seed, and says of each which weights made it. What it
is asked and answers is unlike SGLang's in every word, since a base for servers of any kind has to drive it.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import random
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from aiohttp import web

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
VOCAB_SIZE = 79
TOKEN_S = 0.002
"""Its speed: a response takes so many steps of this length that what runs can be disturbed."""
LOGPROB = -math.log(VOCAB_SIZE)


class OtherServer:
    """What it is doing."""

    def __init__(self, key: str) -> None:
        self.key = key
        self.label = "none"
        self.checksums: dict[str, str] = {}
        self.is_halted = False
        self.has_memory = True
        self.running: set[str] = set()
        self.cancelled: set[str] = set()
        self.news = asyncio.Condition()

    async def tell_all(self) -> web.Response:
        async with self.news:
            self.news.notify_all()
        return web.json_response({})

    async def complete(self, request: web.Request) -> web.StreamResponse:
        asked = await request.json()
        name, seen = asked["id"], len(asked["prompt"])
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        self.running.add(name)
        done, count = "", 0
        while not done:
            async with self.news:
                await self.news.wait_for(lambda: not self.is_halted or name in self.cancelled)
            if name in self.cancelled:
                done = "cancelled"
                break
            token = random.Random(f"{asked['seed']}/{seen + count}").randrange(VOCAB_SIZE)
            count += 1
            done = "eos" if token in asked["ends"] else "length" if count == asked["most"] else ""
            await write(answer, {"ids": [token], "by": self.label, "lps": [LOGPROB]})
            print(f"decoded {len(self.running)} {len(self.running) / TOKEN_S}", flush=True)
            await asyncio.sleep(TOKEN_S)
        self.running.discard(name)
        await write(answer, {"done": done})
        await answer.write(b"data: [DONE]\n\n")
        return answer

    async def cancel(self, request: web.Request) -> web.Response:
        self.cancelled.add((await request.json())["id"])
        return await self.tell_all()

    async def rows(self, request: web.Request) -> web.Response:
        """Of every one of these tokens, how likely it is after each of them but the last."""
        ids = (await request.json())["ids"]
        return web.json_response({"rows": [[LOGPROB] * len(ids)] * (len(ids) - 1)})

    async def live(self, _: web.Request) -> web.Response:
        return web.json_response({"halted": self.is_halted})

    async def engine(self, _: web.Request) -> web.Response:
        return web.json_response({"queued": 0, "cache": 0.1, "sums": self.checksums})

    async def halt(self, _: web.Request) -> web.Response:
        self.is_halted = True
        return await self.tell_all()

    async def go(self, _: web.Request) -> web.Response:
        self.is_halted = False
        return await self.tell_all()

    async def reload(self, request: web.Request) -> web.Response:
        asked = await request.json()
        if not self.has_memory:
            return web.json_response({"error": "it dozes"}, status=409)
        self.checksums = await asyncio.to_thread(checksums_of, Path(asked["folder"], "model.safetensors"))
        self.label = asked["label"]
        return web.json_response({})

    async def doze(self, _: web.Request) -> web.Response:
        if self.running:
            return web.json_response({"error": "requests run"}, status=409)
        self.has_memory, self.checksums = False, {}
        return web.json_response({})

    async def rise(self, _: web.Request) -> web.Response:
        self.has_memory = True
        return web.json_response({})

    @web.middleware
    async def guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({"error": "who are you?"}, status=401)
        return await handler(request)


async def write(answer: web.StreamResponse, event: dict[str, Any]) -> None:
    await answer.write(b"data: " + json.dumps(event).encode() + b"\n\n")


def checksums_of(file: Path) -> dict[str, str]:
    """By tensor of a safetensors file."""
    data = file.read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    table = json.loads(data[8:begin])
    table.pop("__metadata__", None)
    return {
        name: hashlib.sha256(data[begin + entry["data_offsets"][0] : begin + entry["data_offsets"][1]]).hexdigest()
        for name, entry in table.items()
    }


async def serve(key: str) -> None:
    server = OtherServer(key)
    app = web.Application(middlewares=[server.guard])
    app.add_routes([web.get("/live", server.live), web.get("/engine", server.engine)])
    told: list[Handler] = [server.complete, server.cancel, server.rows, server.halt]
    told += [server.go, server.reload, server.doze, server.rise]
    app.add_routes([web.post(f"/{handler.__name__}", handler) for handler in told])
    runner = web.AppRunner(app, shutdown_timeout=0.0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, sys.exit, "fatal: told to end")
    print(f"open at port {runner.addresses[0][1]}", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1]).read_text()))
