"""`slot-cache bench --models FOLDER`: what returning conversations reuse, model by model, with and without rewinding."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import tempfile
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import httpx

from slot_cache.cli.numbers import milliseconds, share
from slot_cache.cli.output import Column, Output, Table
from slot_cache.lab import configs, kinds
from slot_cache.lab.chat import ChatError, Conversation, open_client
from slot_cache.lab.extras import missing_extra
from slot_cache.lab.kinds import AsItStands, KindCase, KindRow, KindsPlan, Returns, WithPlugin, learned_of
from slot_cache.lab.machine import machine_line
from slot_cache.lab.measure import BenchError, Progress, Prompts, tokens_per_sentence
from slot_cache.lab.process import StartError, free_port
from slot_cache.lab.program_server import BINARY_VARIABLE, CONTEXT, ProgramServer
from slot_cache.lab.proxy import LiteLLMProxy
from slot_cache.lab.server import EmbeddedServer, ServerOptions

SAVE_IDLE_SECONDS = 0.2
START_SECONDS = 600.0
"""Models of any size."""
FAULTS = (StartError, ChatError, BenchError, httpx.HTTPError)


@dataclass
class KindsReport:
    """What was measured. `learning` in `plan`: so many returns of each conversation are not counted. Times in ms."""

    machine: str
    server: str
    plan: KindsPlan
    rows: list[KindRow] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this part of the benchmark."""
    parser.add_argument(
        "--models",
        type=Path,
        metavar="FOLDER",
        help="measure this instead: for each *.gguf in FOLDER, what a returning conversation reuses after a swap and after a "
        "restart of the server, with slots saved as they stand and with the plugin, which rewinds them where that helps. "
        "Tiny models of each kind come from the repository: python tests/tiny_models.py FOLDER (needs gguf and numpy)",
    )
    parser.add_argument(
        "--answers-as-given",
        action="store_true",
        help="with --models: the conversations' histories hold the answers as the model gave them; else others, as with a "
        "client that leaves the reasoning out",
    )
    parser.add_argument(
        "--server-bin",
        type=Path,
        metavar="PATH",
        help=f"with --models: llama-server's program to measure on (default: {BINARY_VARIABLE} from the environment, else the "
        "embedded one). Builds that save no context checkpoints, such as b11434, are where rewinding matters",
    )


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Measure and print. Returns 1 when it could not."""
    try:
        binary = find_program(arguments.server_bin)
        missing = missing_extra(("fastapi", "litellm") if binary else ("fastapi", "litellm", "xllamacpp"))
        if missing:
            raise BenchError(missing)
        if arguments.base_url:
            raise BenchError("--models starts servers of its own: it does not go together with --base-url")
        plan = replace(kinds.QUICK if arguments.quick else KindsPlan(), as_given=arguments.answers_as_given)
        report = bench_kinds(output, plan, find_models(arguments.models), binary)
    except FAULTS as error:
        output.line(f"{type(error).__name__}: {error}", "red")
        return 1
    if arguments.json:
        print(json.dumps(asdict(report), indent=2))
    measured = [case for row in report.rows for case in (row.as_it_stands, row.with_plugin)]
    return 0 if all(measured) else 1


def find_program(named: Path | None) -> Path | None:
    """llama-server's program: the one that is named, else that of the environment; None: the embedded server's turn."""
    path = named or (Path(os.environ[BINARY_VARIABLE]) if os.environ.get(BINARY_VARIABLE) else None)
    if path is not None and not (path.is_file() and os.access(path, os.X_OK)):
        source = "--server-bin" if named else BINARY_VARIABLE
        raise BenchError(f"{source}: {path} is no program")
    return path.absolute() if path else None


def find_models(folder: Path) -> list[Path]:
    """The model files of a folder, by name."""
    found = sorted(path.absolute() for path in folder.glob("*.gguf"))
    if not found:
        raise BenchError(f"there is no *.gguf in {folder}")
    return found


def bench_kinds(output: Output, plan: KindsPlan, models: list[Path], binary: Path | None) -> KindsReport:
    """All models, one after the other, each on servers of its own."""
    report = KindsReport(machine_line(), "llama-server, one slot", plan)
    output.line(report.machine)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="slot-cache-bench-")))
        hosts = [Host(model, binary, folder / str(number), free_port()) for number, model in enumerate(models)]
        proxy = LiteLLMProxy(configs.config(*(host.route() for host in hosts)))
        with output.step("starting the LiteLLM proxy (about 10 s)"):
            stack.enter_context(proxy)
        for host in hosts:
            with output.step(host.model.name) as progress:
                report.rows.append(measure_model(report, plan, host, proxy, progress))
    print_kinds(output, report)
    return report


@dataclass(frozen=True)
class Host:
    """Where one model is served: each case has a server of its own, and a folder for what is saved."""

    model: Path
    binary: Path | None
    folder: Path
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def name(self) -> str:
        """The route's."""
        return f"model-{self.folder.name}"

    def saved(self, case: str) -> Path:
        return self.folder / f"saved-{case}"

    def route(self) -> dict[str, object]:
        """The plugin's route to it."""
        options = {"save_path": str(self.saved("plugin")), "save_idle_seconds": SAVE_IDLE_SECONDS}
        return configs.route(self.name, self.url, slot_cache=options)

    def server(self, case: str) -> ProgramServer | EmbeddedServer:
        """A server that is to be started, with nothing in memory."""
        self.folder.mkdir(exist_ok=True)
        saved = self.saved(case)
        if self.binary is None:
            options = ServerOptions(model=self.model, ctx=CONTEXT, save_path=saved, port=self.port)
            return EmbeddedServer(options, folder=self.folder)
        return ProgramServer(
            self.binary,
            self.model,
            self.folder,
            port=self.port,
            save_path=saved,
            start_seconds=START_SECONDS,
        )


def measure_model(report: KindsReport, plan: KindsPlan, host: Host, proxy: LiteLLMProxy, progress: Progress) -> KindRow:
    """Both cases of one model. What could not be measured is noted."""
    found: dict[str, KindCase] = {}
    learned = kinds.NO_LESSON
    texts = secrets.token_hex(3)

    async def as_it_stands(server: ProgramServer | EmbeddedServer) -> None:
        async with open_client(host.url) as client:
            await describe(report, client, host)
            prompts = Prompts(texts, await tokens_per_sentence(client))
            found["stands"] = await kinds.measure_kind(
                AsItStands(client), server, prompts, "", plan, lambda what: progress(f"as it stands, {what}")
            )

    async def with_plugin(server: ProgramServer | EmbeddedServer) -> None:
        nonlocal learned
        async with open_client(proxy.url, proxy.key) as to_proxy, open_client(host.url) as client:
            prompts = Prompts(texts, await tokens_per_sentence(client))
            # The first request through a route imports and connects a lot: not measured.
            await Conversation("", model=host.name).turn(to_proxy, "Hello", 1)
            way = WithPlugin(to_proxy, host.saved("plugin"), host.url)
            try:
                found["plugin"] = await kinds.measure_kind(
                    way, server, prompts, host.name, plan, lambda what: progress(f"with the plugin, {what}")
                )
            finally:
                await way.look()
                learned = learned_of(way.kinds)
            if way.unsaved:
                text = f"{way.unsaved} idle saves did not come in {kinds.SAVE_WAIT_SECONDS:.0f} s each"
                report.notes.append(f"{host.model.name}: {text}")

    for case, measure in (("stands", as_it_stands), ("plugin", with_plugin)):
        try:
            with host.server(case) as server:
                asyncio.run(measure(server))
        except FAULTS as error:
            report.notes.append(f"{host.model.name}: {type(error).__name__}: {error}")
            if isinstance(error, StartError):
                break
    return KindRow(host.model.name, found.get("stands"), found.get("plugin"), learned)


async def describe(report: KindsReport, client: httpx.AsyncClient, host: Host) -> None:
    """Put the server's build into the report."""
    answer = await client.get("/props")
    build = str(answer.json().get("build_info") or "unknown") if answer.status_code == 200 else "unknown"
    which = "embedded llama-server" if host.binary is None else "llama-server"
    report.server = f"{which}, build {build}, one slot"


def print_kinds(output: Output, report: KindsReport) -> None:
    """The table: a row a model."""
    plan = report.plan
    output.line()
    output.line("Returning conversations, by model: reuse and TTFT (medians)", "bold")
    output.line(report.server)
    width = max(len(row.model) for row in report.rows)
    titles = ("as it stands: swap", "TTFT", "restart", "TTFT", "with the plugin: swap", "TTFT", "restart", "TTFT")
    columns = [Column("model", width, right=False), *(Column(title, 9) for title in titles)]
    columns.append(Column("learned", right=False))
    table = Table(output, columns)
    for row in report.rows:
        table.row(row.model, *_cells(row.as_it_stands), *_cells(row.with_plugin), row.learned)
    output.line()
    for line in explanation(plan):
        output.line(line)
    for note in report.notes:
        output.line(f"note: {note}", "yellow")


def explanation(plan: KindsPlan) -> list[str]:
    """What the columns are."""
    answers = [
        "The histories hold other answers than the model gave, as with a client that leaves the reasoning out. Where a prompt",
        "repeats all of an answer token for token, slots restored as they stand are reused too: see --answers-as-given.",
    ]
    if plan.as_given:
        answers = [
            "The histories hold the answers as the model gave them: whether a prompt repeats them token for token depends on it."
        ]
    return [
        "First the slot saved and restored as it stands, by plain calls around requests straight to the server; then with the",
        "plugin, through a LiteLLM proxy. Under swap and restart stands the reuse: the share of the conversation's previous",
        "prompt that was not computed again.",
        *answers,
        "TTFT: with the save of the other conversation, the restore, and the wait for a rewind that is still going on.",
        f"swap: {plan.returns} returns of each of two conversations that take turns on one slot, without a pause.",
        f"restart: {plan.returns} returns to a server that was killed (-9) and started again, upon what was saved when idle.",
        f"The first {plan.learning} returns of each conversation are not counted: the first restore of a model that was not seen "
        "before is of no",
        "use where slots have to be rewound; it starts the lesson.",
        "learned: plain (restores are reused as they are), rewind (those of slots that were rewound are), none (no restore is,",
        "and nothing is saved until the server is started again), nothing (it is not known yet).",
    ]


def _cells(case: KindCase | None) -> tuple[str, ...]:
    if case is None:
        return ("-",) * 4
    return (*_pair(case.after_swap), *_pair(case.after_restart))


def _pair(returns: Returns) -> tuple[str, str]:
    return share(returns.reuse.median), milliseconds(returns.ttft_ms.median)
