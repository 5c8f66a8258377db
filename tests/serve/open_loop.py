"""An open-loop load: requests are sent at their times, whether or not earlier ones were answered, by several processes.

`python open_loop.py PORT RATE SECONDS BEGIN SEED BODY` is one of them: it prints what became of each of its requests.
"""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_PROCESSES = 3
_PATIENCE_S, _IDLE_S = 30.0, 2.0


@dataclass(frozen=True)
class Sent:
    """A request.

    Args:
        due: when it was to be sent, seconds after the begin.
        late: how much later it was.
        status: of the answer; 0: there was none.
        seconds: from when it was due to its answer.
    """

    due: float
    late: float
    status: int
    seconds: float


def run(port: int, rate: float, seconds: float, body: Path) -> list[Sent]:
    """So many requests a second at random times (a Poisson process), for so long; every one of them."""
    begin = time.monotonic() + 1.0  # all clocks of a machine agree; processes start meanwhile
    words = [sys.executable, __file__, str(port), str(rate / _PROCESSES), str(seconds), str(begin)]
    processes = [
        subprocess.Popen([*words, str(seed), str(body)], stdout=subprocess.PIPE, text=True)
        for seed in range(_PROCESSES)
    ]
    found = [Sent(*one) for process in processes for one in json.loads(process.communicate()[0])]
    assert not any(process.returncode for process in processes)
    return sorted(found, key=lambda one: one.due)


class _Connections:
    """Idle ones are used again, but not for long, as servers close them; where there is none, one is opened."""

    def __init__(self, port: int, data: bytes) -> None:
        self._port, self._data = port, data
        self._idle: list[tuple[float, asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def _take(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        while self._idle:
            since, reader, writer = self._idle.pop()
            if time.monotonic() - since < _IDLE_S and not reader.at_eof():
                return reader, writer
            writer.close()
        return await asyncio.open_connection("127.0.0.1", self._port)

    async def ask(self) -> int:
        reader, writer = await self._take()
        writer.write(self._data)
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        fields = dict(line.split(": ", 1) for line in head.split("\r\n")[1:] if line)
        await reader.readexactly(int(fields["content-length"]))
        if fields.get("connection") == "close":
            writer.close()
        else:
            self._idle.append((time.monotonic(), reader, writer))
        return int(head.split()[1])


async def _load(port: int, rate: float, seconds: float, begin: float, seed: int, data: bytes) -> list[list[float]]:
    connections, drawn, found = _Connections(port, data), random.Random(seed), list[list[float]]()

    async def one(due: float) -> None:
        late, status = time.monotonic() - begin - due, 0
        with suppress(OSError, asyncio.IncompleteReadError, TimeoutError):
            status = await asyncio.wait_for(connections.ask(), _PATIENCE_S)
        found.append([due, late, status, time.monotonic() - begin - due])

    tasks, due = [], drawn.expovariate(rate)
    while due < seconds:
        await asyncio.sleep(max(0.0, begin + due - time.monotonic()))
        tasks.append(asyncio.create_task(one(due)))
        due += drawn.expovariate(rate)
    await asyncio.gather(*tasks)
    return found


if __name__ == "__main__":
    content = Path(sys.argv[6]).read_bytes()
    request = "POST /score HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    request += f"Content-Length: {len(content)}\r\n\r\n"
    port_, rate_, seconds_, begin_, seed_ = sys.argv[1:6]
    sent = _load(int(port_), float(rate_), float(seconds_), float(begin_), int(seed_), request.encode() + content)
    print(json.dumps(asyncio.run(sent)))
