"""What the dashboard knows, as lines for a terminal: never more of them than it has, and none longer.

The lines are made here cell by cell, so that nothing a model writes can push a column aside. Colours say nothing that is not also
there in words or signs.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, RenderResult
from rich.segment import Segment
from rich.text import Text

from slot_cache.monitor.model import Dashboard, Happening, RouteView, ServerView, SlotView, short
from slot_cache.monitor.text import clean

TEXT_CHARACTERS = 80
WIDE = 150
"""From this width on the text has a column of its own; below, a line of its own."""

SMALLEST = (20, 3)

_STATE_STYLES = {
    "prefill": "bold yellow",
    "decode": "bold green",
    "switch": "bold magenta",
    "busy": "bold cyan",
    "idle": "",
    "empty": "dim",
    "unknown": "dim",
}
_KIND_STYLES = {
    "warning": "bold red",
    "why": "yellow",
    "miss": "yellow",
    "save": "cyan",
    "restore": "green",
    "switch": "magenta",
    "evict": "cyan",
    "server": "bold",
    "request": "",
}


@dataclass(frozen=True)
class Look:
    """How it is looked at.

    Attributes:
        selected: the slot that the arrows have picked, counted from 0 over all that are shown; None: none.
        history: show the history of that slot instead of the caches and events.
        rate: seconds between two looks.
        plain: ASCII only, for terminals that show nothing else.
    """

    selected: int | None = None
    history: bool = False
    paused: bool = False
    rate: float = 1.0
    plain: bool = False
    keys: bool = True


@dataclass(frozen=True)
class _Column:
    title: str
    width: int
    right: bool = True


_STATE = _Column("state", 11, right=False)
_SESSION = _Column("session", 9, right=False)
_MESSAGES = _Column("msg", 3)
_TOKENS = _Column("tokens", 7)
_CONTEXT = _Column("context", 10, right=False)
_PREFILL = _Column("prefill/s", 9)
_DECODE = _Column("decode/s", 8)
_ANSWER = _Column("n/left", 9)
_SCORE = _Column("score", 7)
_OUTCOME = _Column("outcome", 8, right=False)
_BY_WORTH = (_STATE, _TOKENS, _DECODE, _PREFILL, _CONTEXT, _SESSION, _ANSWER, _MESSAGES, _SCORE, _OUTCOME)
_IN_ORDER = (_STATE, _SESSION, _MESSAGES, _TOKENS, _CONTEXT, _PREFILL, _DECODE, _ANSWER, _SCORE, _OUTCOME)


class Screen:
    """A rich renderable: the dashboard in the size of the console, or in a given one."""

    def __init__(
        self, board: Dashboard, look: Look, now: float, *, size: tuple[int, int] | None = None, fill: bool = True
    ) -> None:
        self._board, self._look, self._now, self._size, self._fill = board, look, now, size, fill

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width, height = self._size or (console.size.width, console.size.height)
        lines = render(self._board, self._look, self._now, width, height)
        if self._fill:
            lines += [Text()] * (height - len(lines))
        for number, line in enumerate(lines):
            if number:
                yield Segment.line()
            yield from line.render(console)
        if not self._fill:
            yield Segment.line()


def render(board: Dashboard, look: Look, now: float, width: int, height: int) -> list[Text]:
    """The lines, from top to bottom: at most `height`, each at most `width` cells."""
    if width < SMALLEST[0] or height < SMALLEST[1]:
        return [_fit(Text("too small"), width)][:height]
    lines = _header(board, look, now, width)
    footer = [_footer(look, width)] if look.keys else []
    room = height - len(lines) - len(footer)
    slots = _slots(board, look, width, room)
    room -= len(slots)
    rest: list[Text] = []
    if look.history and look.selected is not None:
        rest = _history(board, look, width, room)
    elif room > 1:
        caches = _caches(board, look, now, width, min(1 + room // 4, 12) if room > 6 else 1)
        rest = caches + _events(board.events, "events", look, width, room - len(caches))
    lines = [*lines, *slots, *rest][: height - len(footer)]
    lines += [Text()] * (height - len(footer) - len(lines)) if footer else []
    return [_fit(line, width) for line in [*lines, *footer]][:height]


def selectable(board: Dashboard) -> int:
    """How many slots there are to pick from."""
    return sum(len(server.slots) for server in board.shown)


def _header(board: Dashboard, look: Look, now: float, width: int) -> list[Text]:
    line = Text("slot-cache", style="bold")
    for source in board.sources.values():
        state = "..." if source.up is None else "up" if source.up else "DOWN"
        style = {"up": "green", "DOWN": "bold red"}.get(state, "dim")
        line.append(f"  {clean(source.name)} ", style="not bold").append(state, style=style)
    if look.paused:
        line.append("  PAUSED", style="bold reverse")
    clock = time.strftime("%H:%M:%S", time.localtime(now))
    right = f"every {look.rate:g} s  {clock}" if width >= 60 and look.keys else clock
    lines = [_justified(line, right, width)]
    slots = [slot for server in board.shown for slot in server.slots.values()]
    parts = [f"{len(slots)} slots, {sum(slot.busy for slot in slots)} busy, {board.waiting} waiting"]
    if board.totals is not None:
        totals = board.totals
        whole = totals.reused + totals.computed
        parts.append(f"reused {100 * totals.reused / whole:.0f}%" if whole else "nothing reused yet")
        parts.append(f"{totals.seconds_saved:,.0f} s of prefill saved")
        parts.append(f"{totals.saves:,} saves, {totals.restores:,} restores")
        outcomes = ", ".join(f"{count:,} {clean(name)}" for name, count in totals.requests.items() if count)
        if outcomes:
            parts.append(outcomes)
    lines.append(Text(_joined(parts, width)))
    down = [source for source in board.sources.values() if source.up is False and source.detail]
    if down:
        lines.append(Text("; ".join(f"{source.name}: {clean(source.detail)}" for source in down), style="red"))
    return lines


def _slots(board: Dashboard, look: Look, width: int, room: int) -> list[Text]:
    servers = board.shown
    rows = [(server, slot) for server in servers for _, slot in sorted(server.slots.items())]
    if not rows:
        sleeping = [clean(server.title) for server in servers if server.sleeping]
        told = f"asleep: {', '.join(sleeping)}" if sleeping else "no slots seen yet"
        return [Text(), Text(told, style="dim")]
    columns = _columns(width, rows)
    text_width = width - 4 - sum(column.width + 1 for column in columns)
    beside = width >= WIDE
    title = Text("   #", style="bold")
    for column in columns:
        title.append(" " + _cell(column.title, column))
    if beside:
        title.append(" text")
    several = len(servers) > 1
    silent = not any(slot.text for _, slot in rows)
    per_slot = 1 if beside or silent or len(rows) * 2 + len(servers) + 4 > room else 2
    most = max(room - 1, 1)
    blocks: list[list[Text]] = []
    for number, (server, slot) in enumerate(rows):
        lines = []
        if number == 0 or (several and rows[number - 1][0] is not server):
            lines.append(_server(server, width))
        selected = look.selected == number
        lines.append(_row(slot, columns, look, selected=selected, text_width=text_width if beside else 0))
        if per_slot == 2:
            lines.append(_text_line(slot, width))
        blocks.append(lines)
    return [title, *_window(blocks, look.selected, most)]


def _window(blocks: Sequence[list[Text]], selected: int | None, most: int) -> list[Text]:
    """As many whole blocks as there is room for, the selected one among them."""
    first = 0
    if selected is not None and selected < len(blocks):
        while first < selected and sum(len(block) for block in blocks[first : selected + 1]) > most - 1:
            first += 1
    lines: list[Text] = []
    for number in range(first, len(blocks)):
        left = len(blocks) - number
        if len(lines) + len(blocks[number]) > most - (left > 1):
            lines.append(Text(f"   ... {left} more slots", style="dim"))
            break
        lines += blocks[number]
    return lines[:most]


def _columns(width: int, rows: Sequence[tuple[ServerView, SlotView]]) -> list[_Column]:
    """Those that the width has room for, and that somebody has told something for."""
    managed = any(slot.session or slot.key or slot.score is not None or slot.outcome for _, slot in rows)
    left = width - 4
    chosen = set()
    for column in _BY_WORTH:
        if not managed and column in (_SESSION, _MESSAGES, _SCORE, _OUTCOME):
            continue
        if column.width + 1 <= left:
            chosen.add(column)
            left -= column.width + 1
    return [column for column in _IN_ORDER if column in chosen]


def _server(server: ServerView, width: int) -> Text:
    line = Text("-- ", style="dim").append(clean(server.title), style="bold")
    if server.title != server.address:
        line.append(f"  {clean(server.address)}")
    if server.sleeping:
        line.append("  asleep", style="yellow")
    for flag in server.flags:
        line.append(f"  {flag}", style="bold red")
    if server.waiting:
        line.append(f"  {server.waiting} waiting", style="yellow")
    if server.prefill:
        line.append(f"  computes {server.prefill:,.0f} tokens/s", style="dim")
    return line


def _row(slot: SlotView, columns: Sequence[_Column], look: Look, *, selected: bool, text_width: int) -> Text:
    mark = ">" if selected else " "
    goes_next = slot.next_to_go and slot.state != "empty"
    line = Text(f"{mark}{'*' if goes_next else ' '}{slot.id:>2}", style="reverse" if selected else "")
    for column in columns:
        line.append(" ")
        line.append(_cell(_value(slot, column, look), column), style=_style(slot, column))
    if text_width > 1:
        line.append(
            " " + _end_of(slot.text, min(text_width - 1, TEXT_CHARACTERS)), style="italic" if slot.busy else "dim"
        )
    return line


def _value(slot: SlotView, column: _Column, look: Look) -> str:
    if column is _STATE:
        if slot.state == "prefill" and slot.progress is not None:
            return f"prefill {100 * slot.progress:.0f}%"
        if slot.state == "idle":
            return "idle, dirty" if slot.dirty else "idle, cache"
        return slot.state
    if slot.state == "empty" and column in (_SESSION, _MESSAGES, _SCORE):
        return "-"  # the plugin remembers what was there until it looks again
    if column is _SESSION:
        return clean(short(slot.holder or slot.session or slot.key)) or "-"
    if column is _MESSAGES:
        return "-" if slot.messages is None else str(min(slot.messages, 999))
    if column is _TOKENS:
        return f"{slot.tokens:,}" if slot.tokens < 1_000_000 else f"{slot.tokens / 1e6:.2f}M"
    if column is _CONTEXT:
        return _bar(slot.tokens / slot.context, look) if slot.context else "-"
    if column is _PREFILL:
        return _speed(slot.prefill_speed)
    if column is _DECODE:
        return _speed(slot.decode_speed)
    if column is _ANSWER:
        if slot.decoded is None:
            return "-"
        left = "" if slot.remaining is None else f"/{_short_number(slot.remaining)}"
        return f"{_short_number(slot.decoded)}{left}"
    if column is _SCORE:
        return "-" if slot.score is None else f"{slot.score:,.1f}" if slot.score < 10_000 else f"{slot.score:.1e}"
    return clean(slot.outcome or "-")


def _style(slot: SlotView, column: _Column) -> str:
    if column is _STATE:
        return _STATE_STYLES[slot.state]
    if column is _SCORE and slot.next_to_go:
        return "bold yellow"
    if column is _CONTEXT and slot.context and slot.tokens > 0.9 * slot.context:
        return "yellow"
    return ""


def _bar(share: float, look: Look) -> str:
    full, empty = ("#", ".") if look.plain else ("█", "░")
    share = min(max(share, 0.0), 1.0)
    filled = round(share * 5)
    return f"{full * filled}{empty * (5 - filled)} {100 * share:>3.0f}%"


def _text_line(slot: SlotView, width: int) -> Text:
    return Text("     " + _end_of(slot.text, min(width - 5, TEXT_CHARACTERS)), style="italic" if slot.busy else "dim")


def _end_of(text: str, cells: int) -> str:
    """The end of a text, in so many cells at most."""
    shown = clean(text)[-cells:] if cells > 0 else ""
    while cell_len(shown) > cells:
        shown = shown[1:]
    return shown


def _caches(board: Dashboard, look: Look, now: float, width: int, most: int) -> list[Text]:
    if not board.routes:
        return []
    files, size = sum(route.files for route in board.routes), sum(route.size for route in board.routes)
    lines = [_rule(f"caches on disk: {files:,} files, {_bytes(size)}", look, width)]
    for route in board.routes[: max(most - 1, 0)]:
        lines.append(_route(route, width))
    newest = sorted((cache for route in board.routes for cache in route.caches), key=lambda cache: -cache.used)
    for cache in newest[: max(most - len(lines), 0)]:
        told = (
            f"  {clean(short(cache.session or cache.key)):<16} {cache.tokens:>9,} tokens {cache.size / 1e6:>9,.1f} MB"
        )
        lines.append(Text(f"{told}  used {_ago(now - cache.used)} ago, restored {cache.uses:,} x", style="dim"))
    return lines[:most]


def _route(route: RouteView, width: int) -> Text:
    limits = []
    if route.max_files:
        limits.append(f"{route.max_files:,} files")
    if route.max_bytes:
        limits.append(_bytes(route.max_bytes))
    limit = f" of at most {', '.join(limits)}" if limits else ""
    return Text(f" {clean(route.route)}: {route.files:,} files, {_bytes(route.size)}{limit}")


def _events(events: Sequence[Happening], title: str, look: Look, width: int, room: int) -> list[Text]:
    if room < 2:
        return []
    lines = [_rule(title, look, width)]
    for entry in list(events)[-(room - 1) :]:
        when = "earlier " if entry.at is None else time.strftime("%H:%M:%S", time.localtime(entry.at))
        line = Text(f" {when} ", style="dim")
        line.append(f"{entry.kind:<8}", style=_KIND_STYLES[entry.kind] or "default").append(f" {clean(entry.text)}")
        lines.append(line)
    return lines


def _history(board: Dashboard, look: Look, width: int, room: int) -> list[Text]:
    rows = [slot for server in board.shown for _, slot in sorted(server.slots.items())]
    if look.selected is None or look.selected >= len(rows):
        return []
    slot = rows[look.selected]
    about = [f"slot {slot.id}"]
    about += [f"{name} {clean(str(value))}" for name, value in (("route", slot.route), ("cache", slot.key)) if value]
    about += [f"last prompt {slot.prompt_tokens:,} tokens"] if slot.prompt_tokens else []
    lines = _events(slot.history, _joined(about, width - 6), look, width, room)
    return lines if len(lines) > 1 else [*lines, Text(" nothing seen yet", style="dim")][:room]


def _footer(look: Look, width: int) -> Text:
    keys = "q quit  p pause  +/- rate  up/down slot  enter " + ("back" if look.history else "history")
    if width >= 80:
        keys += "  * goes next"
    return Text(keys, style="reverse")


def _rule(title: str, look: Look, width: int) -> Text:
    line = "-" if look.plain else "─"
    head = f"{line * 2} {title} "
    return Text(head + line * max(width - cell_len(head), 0), style="dim")


def _cell(text: str, column: _Column) -> str:
    text = set_cell_size(text, column.width) if cell_len(text) > column.width else text
    blanks = " " * (column.width - cell_len(text))
    return blanks + text if column.right else text + blanks


def _fit(line: Text, width: int) -> Text:
    line.no_wrap, line.end = True, ""
    if line.cell_len > width:
        line.truncate(width, overflow="crop")
    return line


def _justified(line: Text, right: str, width: int) -> Text:
    room = width - len(right) - 1
    if line.cell_len > room:
        line.truncate(max(room, 0), overflow="crop")
    return line.append(" " * (width - line.cell_len - len(right))).append(right, style="not bold")


def _joined(parts: Sequence[str], width: int) -> str:
    """As many parts as there is room for."""
    line = parts[0]
    for part in parts[1:]:
        if len(line) + 3 + len(part) > width:
            break
        line += f" | {part}"
    return line


def _speed(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _short_number(value: int) -> str:
    return str(value) if value < 10_000 else f"{value / 1000:.0f}k" if value < 1_000_000 else f"{value / 1e6:.0f}M"


def _bytes(value: int) -> str:
    return f"{value / 2**30:,.1f} GiB" if value >= 2**30 else f"{value / 2**20:,.1f} MiB"


def _ago(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f}{unit}"
    return f"{max(seconds, 0):.0f}s"
