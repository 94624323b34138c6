"""`slot-cache bench`: what reuse, a switch and the plugin itself cost on this machine."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import secrets
import sys
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

import httpx

from slot_cache.cli import bench_kinds
from slot_cache.cli.bench_report import (
    print_load,
    print_overhead,
    print_prefill,
    print_shared,
    print_slots,
    print_switch,
)
from slot_cache.cli.output import Output
from slot_cache.lab import configs
from slot_cache.lab.chat import ChatError, Conversation, open_client
from slot_cache.lab.extras import missing_extra
from slot_cache.lab.machine import machine_line
from slot_cache.lab.measure import (
    FILE_NAME,
    BenchError,
    LoadResult,
    LoadRound,
    OverheadResult,
    PrefillResult,
    Prompts,
    SharedResult,
    SharedRow,
    SlotsResult,
    SwitchResult,
    load_row,
    measure_load,
    measure_overhead,
    measure_prefill,
    measure_shared,
    measure_switch,
    tokens_per_sentence,
)
from slot_cache.lab.models import ModelNotInstalledError, smollm2
from slot_cache.lab.process import StartError, free_port
from slot_cache.lab.proxy import LiteLLMProxy
from slot_cache.lab.server import EmbeddedServer, ServerOptions

MANAGED, ALONE, PLAIN = "managed", "managed-0", "plain"
"""The routes with the plugin, in all slots and in slot 0 alone, and the one without it; see also `pinned_routes`."""
SLOTS, SERVER_RAM_MIB = 4, 8192
"""llama-server's own defaults."""
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True)
class Plan:
    """How much is measured. Lengths in tokens."""

    prefill_lengths: tuple[int, ...] = (512, 1024, 2048, 4096)
    prefill_samples: int = 3
    switch_lengths: tuple[int, ...] = (512, 2048, 4096)
    switch_samples: int = 10
    overhead_pairs: int = 200
    load_sessions: int = 4
    load_turns: int = 3
    load_tokens: int = 500
    load_rounds: int = 3
    slots_sessions: int = 6
    slots_turns: int = 3
    slots_tokens: int = 500
    slots_rounds: int = 2
    shared_sessions: int = 5
    shared_tokens: int = 1000


QUICK = Plan((256, 1024), 2, (1024,), 6, 40, 4, 3, 300, 1, 6, 3, 200, 1, 3, 400)


@dataclass
class Report:
    """Everything that was measured. A section that could not be is None, and `notes` says why."""

    machine: str
    server: str
    plan: Plan
    prefill: PrefillResult | None = None
    switch: SwitchResult | None = None
    overhead: OverheadResult | None = None
    load: LoadResult | None = None
    slots: SlotsResult | None = None
    shared: SharedResult | None = None
    notes: list[str] = field(default_factory=list)


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "bench",
        help="measure prefill, switches, overhead and reuse under load",
        description=(
            "Measures on an embedded llama-server (CPU, SmolLM2-135M, ten minutes and more), or on a running one with "
            "--base-url, through a LiteLLM proxy of its own: TTFT cold, resident and restored by prompt length; the cost of a "
            "switch; what the plugin adds to a request that needs no switch; reuse under concurrent sessions, in one slot and "
            "with more of them than slots; what new sessions reuse of a system prompt that others have computed. With --models "
            "something else: what rewinding brings, by kind of model."
        ),
    )
    parser.add_argument(
        "--base-url", help="a running llama-server to measure on, without /v1; nobody else should use it meanwhile"
    )
    parser.add_argument("--api-key", help="its key, if it has one")
    parser.add_argument("--model", type=Path, help="GGUF file for the embedded server (default: SmolLM2-135M)")
    parser.add_argument("--sessions", type=int, help="sessions at once in one slot (default: 4)")
    parser.add_argument("--quick", action="store_true", help="short prompts and few samples: two to three minutes")
    bench_kinds.add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print the report as JSON; progress goes to stderr")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Measure and print. Returns 1 when it could not."""
    output = Output(sys.stderr if arguments.json else sys.stdout)
    if arguments.models:
        return bench_kinds.run(arguments, output)
    if arguments.server_bin or arguments.answers_as_given:
        output.line("--server-bin and --answers-as-given are for --models only", "red")
        return 1
    missing = missing_extra(("fastapi", "litellm") if arguments.base_url else ("fastapi", "litellm", "xllamacpp"))
    if missing:
        output.line(missing, "red")
        return 1
    plan = QUICK if arguments.quick else Plan()
    if arguments.sessions:
        plan = replace(plan, load_sessions=arguments.sessions)
    try:
        if arguments.base_url:
            report = bench_running(output, plan, arguments.base_url, arguments.api_key)
        else:
            report = bench_embedded(output, plan, arguments.model or smollm2())
    except (ModelNotInstalledError, StartError, ChatError, BenchError, httpx.HTTPError) as error:
        output.line(f"{type(error).__name__}: {error}", "red")
        return 1
    for note in report.notes:
        output.line()
        output.line(f"note: {note}", "yellow")
    if arguments.json:
        print(json.dumps(asdict(report), indent=2))
    return 0


@dataclass(frozen=True)
class Kind:
    """A row of a comparison: through which routes, on which server."""

    label: str
    routes: tuple[str, ...]
    server: ServerOptions


def bench_embedded(output: Output, plan: Plan, model: Path) -> Report:
    """All sections, each on a fresh server of this process."""
    report = Report(machine_line(), f"embedded llama-server, {model.name}, CPU", plan)
    _print_head(output, report)
    run = secrets.token_hex(3)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="slot-cache-bench-")))
        port = free_port()
        context = max(*plan.prefill_lengths, *plan.switch_lengths, plan.load_tokens, plan.shared_tokens) + 2048
        single = ServerOptions(model=model, ctx=context, save_path=folder / "saved", port=port)
        double = replace(single, ctx=4096, slots=2)
        with_ram = replace(single, cache_ram_mib=SERVER_RAM_MIB)
        several = replace(single, ctx=SLOTS * (plan.slots_tokens + 2048), slots=SLOTS)
        defaults = replace(several, kv_unified=True, cache_idle_slots=True, cache_ram_mib=SERVER_RAM_MIB)
        url = f"http://127.0.0.1:{port}"
        # What the sections before have left goes first, however often it was restored.
        asked = {"save_path": str(folder / "saved"), "max_files": 16, "evict": "lru"}
        proxy = _start_proxy(output, stack, url, None, asked, SLOTS)

        def on(options: ServerOptions, section: Callable[[Bench], Awaitable[T]]) -> T:
            with EmbeddedServer(options, folder=folder):
                return asyncio.run(_with_bench(output, plan, run, url, None, proxy, section))

        def compare(kinds: Sequence[Kind], rounds: int, section: Section[T]) -> dict[str, list[T]]:
            """So many rounds of each kind, by turns. Each has texts of its own: what was saved in one is still there."""
            done: dict[str, list[T]] = {kind.label: [] for kind in kinds}
            for number, (place, kind) in itertools.product(range(rounds), enumerate(kinds)):
                one = partial(section, label=kind.label, routes=kind.routes, texts=f"{run}-{place}-{number}")
                done[kind.label].append(on(kind.server, one))
            return done

        report.prefill = on(single, Bench.prefill)
        report.switch = on(single, Bench.switch)
        report.overhead = on(double, Bench.overhead)
        kinds = [
            Kind("without the plugin", (PLAIN,), single),
            Kind("without, server's RAM cache on", (PLAIN,), with_ram),
            Kind("with the plugin", (MANAGED,), single),
        ]
        report.load = summarise_load(output, compare(kinds, plan.load_rounds, Bench.load))
        pinned = pinned_routes(SLOTS)
        several_kinds = [
            Kind("pinned, -np 4 --cache-ram 0", pinned, several),
            Kind("plugin, -np 4 --cache-ram 0", (MANAGED,), several),
            Kind("pinned, server's own defaults", pinned, defaults),
            Kind("plugin, server's own defaults", (MANAGED,), defaults),
        ]
        report.slots = summarise_slots(output, SLOTS, compare(several_kinds, plan.slots_rounds, Bench.more_than_slots))
        kinds.append(Kind("with both", (MANAGED,), with_ram))
        report.shared = summarise_shared(output, compare(kinds, 1, Bench.shared))
    return report


def bench_running(output: Output, plan: Plan, base_url: str, api_key: str | None) -> Report:
    """What can be measured on a server that is not ours: sections that it does not allow are left out, with a note."""
    url = base_url.rstrip("/").removesuffix("/v1")
    slots, server_line = describe_server(url, api_key)
    plan = replace(plan, slots_sessions=slots + max(slots // 2, 1))
    report = Report(machine_line(), server_line, plan)
    _print_head(output, report)
    run = secrets.token_hex(3)
    with ExitStack() as stack:
        proxy = _start_proxy(output, stack, url, api_key, {}, slots)

        async def compare(
            bench: Bench, without: tuple[str, ...], rounds: int, section: Section[T]
        ) -> dict[str, list[T]]:
            # Its caches are not ours to clear, so each round has texts of its own.
            kinds = {"without the plugin": without, "with the plugin": (MANAGED,)}
            done: dict[str, list[T]] = {label: [] for label in kinds}
            for number in range(rounds):
                for label, routes in kinds.items():
                    texts = f"{run}-{routes[0]}-{number}"
                    done[label].append(await section(bench, label, routes, texts))
            return done

        async def sections(bench: Bench) -> None:
            report.prefill = await _noted(report, "prefill", bench.prefill())
            report.switch = await _noted(report, "switch", bench.switch())
            if slots > 1:
                report.overhead = await _noted(report, "overhead", bench.overhead())
            else:
                report.notes.append("overhead: not measured, it needs a server with two slots")
            report.load = summarise_load(output, await compare(bench, (PLAIN,), plan.load_rounds, Bench.load))
            if slots > 1:
                done = await compare(bench, pinned_routes(slots), plan.slots_rounds, Bench.more_than_slots)
                report.slots = summarise_slots(output, slots, done)
            report.shared = summarise_shared(output, await compare(bench, (PLAIN,), 1, Bench.shared))
            if report.switch:
                text = f"this run's files are still in the server's --slot-save-path: {FILE_NAME} and {MANAGED}-*.bin"
                report.notes.append(text)

        asyncio.run(_with_bench(output, plan, run, url, api_key, proxy, sections))
    return report


def pinned_routes(slots: int) -> tuple[str, ...]:
    """The routes without the plugin that lead to one slot each."""
    return tuple(f"pinned-{slot}" for slot in range(slots))


def describe_server(url: str, api_key: str | None) -> tuple[int, str]:
    """Number of slots of a running server, and a line that tells server, model and slots. Raises BenchError."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        response = httpx.get(f"{url}/props", headers=headers, timeout=10.0)
    except httpx.HTTPError as error:
        raise BenchError(f"{url} does not answer: {error}") from error
    if response.status_code != 200:
        raise BenchError(
            f"GET {url}/props answered {response.status_code}: is it a llama-server, and is the key right?"
        )
    props = response.json()
    slots = int(props.get("total_slots") or 1)
    model = Path(props.get("model_path") or "unknown model").name
    return slots, f"{url}, {model}, {slots} {'slot' if slots == 1 else 'slots'}"


@dataclass(frozen=True)
class Bench:
    """One server and the proxy in front of it, and what to measure on them."""

    output: Output
    plan: Plan
    prompts: Prompts
    proxy: httpx.AsyncClient
    server: httpx.AsyncClient

    async def prefill(self) -> PrefillResult:
        plan = self.plan
        with self.output.step("TTFT by prompt length") as progress:
            result = await measure_prefill(
                self.proxy, ALONE, self.prompts, plan.prefill_lengths, plan.prefill_samples, progress
            )
        print_prefill(self.output, result)
        return result

    async def switch(self) -> SwitchResult:
        plan = self.plan
        with self.output.step("cost of a switch") as progress:
            result = await measure_switch(
                self.proxy, self.server, ALONE, self.prompts, plan.switch_lengths, plan.switch_samples, progress
            )
        print_switch(self.output, result)
        return result

    async def overhead(self) -> OverheadResult:
        with self.output.step("overhead of the plugin") as progress:
            result = await measure_overhead(
                self.proxy, ALONE, "pinned-1", self.prompts, self.plan.overhead_pairs, progress
            )
        print_overhead(self.output, result)
        return result

    async def load(self, label: str, routes: Sequence[str], texts: str) -> LoadRound:
        plan = self.plan
        size = (plan.load_sessions, plan.load_turns, plan.load_tokens)
        return await self._at_once(f"at once, {label}", routes, f"{texts}-load", size)

    async def more_than_slots(self, label: str, routes: Sequence[str], texts: str) -> LoadRound:
        plan = self.plan
        size = (plan.slots_sessions, plan.slots_turns, plan.slots_tokens)
        return await self._at_once(f"at once in fewer slots, {label}", routes, f"{texts}-slots", size)

    async def _at_once(self, what: str, routes: Sequence[str], texts: str, size: tuple[int, int, int]) -> LoadRound:
        with self.output.step(f"{size[0]} sessions {what}"):
            return await measure_load(self.proxy, routes, replace(self.prompts, label=texts), *size)

    async def shared(self, label: str, routes: Sequence[str], texts: str) -> SharedRow:
        plan = self.plan
        prompts = replace(self.prompts, label=f"{texts}-shared")
        with self.output.step(f"new sessions with a common system prompt, {label}"):
            return await measure_shared(
                self.proxy, self.server, routes[0], prompts, plan.shared_sessions, plan.shared_tokens, label
            )


class Section(Protocol[T_co]):
    """A part of the benchmark that is done again and again, for the rows of a table: on `routes`, with texts of its own."""

    def __call__(self, bench: Bench, /, label: str, routes: Sequence[str], texts: str) -> Awaitable[T_co]: ...


def summarise_load(output: Output, rounds: Mapping[str, Sequence[LoadRound]]) -> LoadResult:
    """Print and return what the rounds of each kind, by label, came to."""
    result = LoadResult([load_row(label, done) for label, done in rounds.items()])
    print_load(output, result)
    return result


def summarise_slots(output: Output, slots: int, rounds: Mapping[str, Sequence[LoadRound]]) -> SlotsResult:
    """The same for more sessions than slots."""
    result = SlotsResult(slots, [load_row(label, done) for label, done in rounds.items()])
    print_slots(output, result)
    return result


def summarise_shared(output: Output, rounds: Mapping[str, Sequence[SharedRow]]) -> SharedResult:
    """The same for sessions with a common system prompt."""
    result = SharedResult([row for done in rounds.values() for row in done])
    print_shared(output, result)
    return result


def _print_head(output: Output, report: Report) -> None:
    output.line(report.machine)
    output.line(report.server)


async def _with_bench(
    output: Output,
    plan: Plan,
    run: str,
    url: str,
    api_key: str | None,
    proxy: LiteLLMProxy,
    section: Callable[[Bench], Awaitable[T]],
) -> T:
    async with open_client(proxy.url, proxy.key) as to_proxy, open_client(url, api_key) as to_server:
        prompts = Prompts(run, await tokens_per_sentence(to_server))
        # The first request through a route imports and connects a lot: not measured.
        for route in (PLAIN, MANAGED, ALONE):
            await Conversation("", model=route).turn(to_proxy, "Hello", 1)
        return await section(Bench(output, plan, prompts, to_proxy, to_server))


async def _noted(report: Report, name: str, section: Awaitable[T]) -> T | None:
    try:
        return await section
    except BenchError as error:
        report.notes.append(f"{name}: not measured, {error}")
        return None


def _start_proxy(
    output: Output, stack: ExitStack, url: str, api_key: str | None, slot_cache: Mapping[str, object], slots: int
) -> LiteLLMProxy:
    # LiteLLM may keep a connection to a server that was stopped since: such a request is sent again.
    route = partial(configs.route, base_url=url, api_key=api_key, retries=3)
    config = configs.config(
        route(MANAGED, slot_cache=slot_cache),
        route(ALONE, slot_cache={**slot_cache, "slot": 0}),
        route(PLAIN),
        *(route(name, id_slot=slot) for slot, name in enumerate(pinned_routes(slots))),
    )
    with output.step("starting the LiteLLM proxy (about 10 s)"):
        return stack.enter_context(LiteLLMProxy(config))
