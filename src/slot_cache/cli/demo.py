"""`slot-cache demo`: three conversations on one slot of a real llama-server, without the plugin and with it."""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from slot_cache.cli.numbers import share, times
from slot_cache.cli.output import Column, Output, Table
from slot_cache.lab import configs
from slot_cache.lab.chat import ChatError, Conversation, Turn, open_client
from slot_cache.lab.documents import document
from slot_cache.lab.extras import missing_extra
from slot_cache.lab.machine import machine_line
from slot_cache.lab.models import ModelNotInstalledError, smollm2
from slot_cache.lab.process import StartError
from slot_cache.lab.proxy import LiteLLMProxy
from slot_cache.lab.server import EmbeddedServer, ServerOptions
from slot_cache.lab.stats import Totals, totals

ROUTE = "smol"
SESSIONS = ("harbour", "orchard", "foundry")
QUESTIONS = (
    "Which entry of this chronicle would you read to a child, and why?",
    "Who is mentioned most often? Answer in one sentence.",
    "Name two things that were repaired.",
    "Invent the next entry of the chronicle.",
)
# Not always the same order: the server's own RAM cache finds some of them again.
BEFORE_KILL = (("harbour", "orchard", "foundry"), ("harbour", "foundry", "orchard"))
AFTER_KILL = (("orchard", "harbour", "foundry"), ("foundry", "harbour", "orchard"))
SENTENCES = 36
MAX_TOKENS = 24
CONTEXT = 4096
CACHE_RAM_MIB = 60  # a conversation is 24 to 27 MiB; the server makes room for one before it looks for another
SAVE_IDLE_SECONDS = 1
SAVE_WAIT_SECONDS = 20.0
COLUMNS = (
    Column("session", 8, right=False),
    Column("turn"),
    Column("outcome", 9, right=False),
    Column("prompt tokens"),
    Column("reused tokens"),
    Column("TTFT"),
)
SUMMARY_COLUMNS = (
    Column("returning turns", 26, right=False),
    Column("without", 9),
    Column("with", 9),
    Column("without/with"),
)


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "demo",
        help="play conversations on a real llama-server, without the plugin and with it",
        description=(
            "Starts a real llama-server (CPU, SmolLM2-135M, one slot) and a real LiteLLM proxy on this machine and plays "
            "three interleaved conversations, without the plugin and with it. Takes two to three minutes."
        ),
    )
    parser.add_argument(
        "--serve", action="store_true", help="play nothing: keep server and proxy up and say how to ask"
    )
    parser.add_argument("--port", type=int, default=0, help="port of the proxy (default: a free one)")
    parser.add_argument("--model", type=Path, help="another GGUF file than SmolLM2's")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Play the demo or, with --serve, keep it up until it is interrupted."""
    output = Output()
    missing = missing_extra()
    if missing:
        output.line(missing, "red")
        return 1
    try:
        stage = Stage(output, arguments.model or smollm2(), arguments.port)
        if arguments.serve:
            serve(stage)
        else:
            play(stage)
    except (ModelNotInstalledError, StartError, ChatError, httpx.HTTPError) as error:
        output.line(f"{type(error).__name__}: {error}", "red")
        return 1
    return 0


@dataclass(frozen=True)
class Stage:
    """Where a run takes place."""

    output: Output
    model: Path
    port: int = 0

    @contextmanager
    def up(self, *, plugin: bool) -> Iterator[tuple[EmbeddedServer, LiteLLMProxy, Path]]:
        """A fresh server and a proxy in front of it, and the folder of the saved caches; all gone at the end."""
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="slot-cache-demo-")))
            saved = folder / "saved"
            options = ServerOptions(model=self.model, ctx=CONTEXT, save_path=saved, cache_ram_mib=CACHE_RAM_MIB)
            with self.output.step("starting llama-server"):
                server = stack.enter_context(EmbeddedServer(options, folder=folder))
            config = proxy_config(server.base_url, saved if plugin else None)
            with self.output.step("starting the LiteLLM proxy (about 10 s)"):
                proxy = stack.enter_context(LiteLLMProxy(config, port=self.port, folder=folder))
            yield server, proxy, saved


def proxy_config(base_url: str, saved: Path | None) -> dict[str, object]:
    """LiteLLM's config: with the plugin when there is a folder of saved caches, else without."""
    options: Mapping[str, object] | None = None
    if saved is not None:
        options = {"save_path": str(saved), "save_idle_seconds": SAVE_IDLE_SECONDS}
    return configs.config(configs.route(ROUTE, base_url, slot_cache=options))


def play(stage: Stage) -> None:
    """Both runs and the summary."""
    output = stage.output
    output.line(
        "Three conversations take turns on one slot of a real llama-server, behind a real LiteLLM proxy.", "bold"
    )
    output.line(machine_line())
    output.line(
        "SmolLM2-135M on a CPU stands in for a big model: the seconds are small here, the ratios are what to look at."
    )
    output.line(
        f"llama-server: 1 slot, --cache-ram {CACHE_RAM_MIB}: its own RAM cache has room for two of these conversations, not for\n"
        "three, as on a machine whose conversations have outgrown it. In the middle it is killed (-9) and started again."
    )
    without = play_one(stage, plugin=False)
    with_plugin = play_one(stage, plugin=True)
    output.line()
    table = Table(output, SUMMARY_COLUMNS)
    for row in summary_rows(without, with_plugin):
        table.row(*row)


def play_one(stage: Stage, *, plugin: bool) -> Totals:
    """One run on a fresh server, printed row by row."""
    output = stage.output
    output.line()
    output.line("With the plugin" if plugin else "Without the plugin", "bold")
    with stage.up(plugin=plugin) as (server, proxy, saved):

        async def restart() -> None:
            if plugin:
                with output.status("waiting until the last cache is saved ..."):
                    await wait_for_save(saved, since=time.time())
            server.kill()
            server.start()
            output.line("-- llama-server was killed (-9) and started again --", "yellow")

        return asyncio.run(perform(output, proxy, restart))


async def perform(output: Output, proxy: LiteLLMProxy, restart: Callable[[], Awaitable[None]]) -> Totals:
    """The conversations, as a client of the proxy sees them."""
    table = Table(output, COLUMNS)
    conversations = {name: Conversation(f"demo-{name}", system_prompt(name), ROUTE) for name in SESSIONS}
    turns: dict[str, list[Turn]] = {name: [] for name in SESSIONS}
    async with open_client(proxy.url, proxy.key) as client:

        async def rounds(orders: Sequence[Sequence[str]]) -> None:
            for name in (name for order in orders for name in order):
                number = len(turns[name])
                with output.status(f"{name}, turn {number + 1} ..."):
                    turn = await conversations[name].turn(client, QUESTIONS[number], MAX_TOKENS)
                turns[name].append(turn)
                table.row(*turn_row(name, number + 1, turn), style=turn_style(turn, first=number == 0))

        # LiteLLM's first request imports a lot: nobody's, and not shown.
        await Conversation("", model=ROUTE).turn(client, "Hello", 1)
        await rounds(BEFORE_KILL)
        await restart()
        await rounds(AFTER_KILL)
    return totals(turns.values())


def system_prompt(name: str) -> str:
    """The long text that a conversation is about."""
    text = document(f"of the {name}", sentences=SENTENCES)
    return f"You answer questions about this chronicle, briefly.\n\n{text}"


def turn_row(name: str, number: int, turn: Turn) -> tuple[str, ...]:
    """A turn as the cells of a table row."""
    tokens = (f"{turn.prompt_tokens:,}", f"{turn.cached_tokens:,}")
    return (name, str(number), turn.outcome or "-", *tokens, f"{turn.ttft_seconds:.2f} s")


def turn_style(turn: Turn, *, first: bool) -> str:
    """Green: most of the prompt was reused; red: a returning turn was computed anew."""
    if turn.cached_tokens > turn.prompt_tokens / 2:
        return "green"
    return "" if first else "red"


def summary_rows(without: Totals, with_plugin: Totals) -> list[tuple[str, str, str, str]]:
    """The two runs side by side, as rows of the summary table."""
    a, b = without, with_plugin
    return [
        ("prompt tokens", f"{a.prompt_tokens:,}", f"{b.prompt_tokens:,}", ""),
        (
            "tokens computed",
            f"{a.computed_tokens:,}",
            f"{b.computed_tokens:,}",
            times(a.computed_tokens, b.computed_tokens),
        ),
        (
            "TTFT, all together",
            f"{a.ttft_seconds:.2f} s",
            f"{b.ttft_seconds:.2f} s",
            times(a.ttft_seconds, b.ttft_seconds),
        ),
        ("reuse of the last prompt", share(a.reuse), share(b.reuse), ""),
    ]


async def wait_for_save(folder: Path, since: float, timeout: float = SAVE_WAIT_SECONDS) -> bool:
    """Wait until a cache is saved that is newer than `since` (seconds of the epoch). False after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while _newest(folder) < since:
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.1)
    return True


def _newest(folder: Path) -> float:
    return max((path.stat().st_mtime for path in folder.glob("*.bin")), default=0.0)


def serve(stage: Stage) -> None:
    """Keep server and proxy up, with the plugin, until this process is interrupted."""
    output = stage.output
    with stage.up(plugin=True) as (server, proxy, saved):
        for line in serve_lines(proxy.url, proxy.key, server.base_url, saved, proxy.log_path):
            output.line(line)
        while server.running and proxy.running:
            time.sleep(0.5)
        raise StartError(f"{'the LiteLLM proxy' if server.running else 'llama-server'} ended by itself")


def serve_lines(url: str, key: str, server_url: str, saved: Path, log_path: Path) -> list[str]:
    """What to tell somebody who wants to try it."""
    return [
        "",
        f"LiteLLM proxy   {url}/v1",
        f"key             {key}",
        f"model           {ROUTE}",
        f"llama-server    {server_url} (1 slot)",
        f"saved caches    {saved}",
        f"proxy's log     {log_path}",
        "",
        "Try this with other session ids in between, and look at x-slot-cache and cached_tokens:",
        "",
        f"curl -i {url}/v1/chat/completions -H 'Authorization: Bearer {key}' \\",
        "  -H 'Content-Type: application/json' -H 'X-Session-ID: my-session' \\",
        f"""  -d '{{"model": "{ROUTE}", "max_tokens": 32, "messages": [{{"role": "user", "content": "Hello"}}]}}'""",
        "",
        "Ctrl-C ends both.",
    ]
