"""What is saved, and what is in which slot: kept where every worker of every proxy on the machine finds it.

`Index` is the small base; `SqliteIndex` keeps it in one SQLite database for one machine, `MemoryIndex` for one process
where there is no place for a file. The index never fails a request: a database that is damaged is put aside and made
anew, one that is locked or cannot be written is done without, and either is said once.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TypeVar

import portalocker

from slot_cache import report
from slot_cache.why import Recomputed

SCHEMA = 3
BUSY_SECONDS = 0.5
"""How long a call waits for another process that writes. A write takes well below a millisecond."""

MOST_RECOMPUTED = 2_000
"""So many notes of why a request was computed again are kept; the oldest go first."""

_T = TypeVar("_T")


@dataclass(frozen=True)
class CacheRow:
    """One saved cache.

    Attributes:
        folder: where its file is: the save_path, or, where that cannot be seen, the server's address.
        key: the file's name without .bin.
        route: the model_name.
        model: the fingerprint of the model that wrote it.
        tokens, size: what the server said of the save.
        checksum: of the whole file, "" if it was too large to take.
        sample: checksum of head, tail and samples between, "" where the file cannot be seen.
        chain: the prompt's fingerprint.
        created, used: seconds since the epoch.
        uses: how often it was restored.
        seconds: prefill it stands for, 0 if not known.
        pending: a save that has been checked and is about to get this name; the file is this row or that.
        session: the key of its session's first cache, None for a conversation without a session.
        owner: the LiteLLM key that its tokens belong to, None if not known.
        rewound: as in `slot_cache.state.Resident`.
    """

    folder: str
    key: str
    route: str
    model: str
    tokens: int
    size: int
    checksum: str = ""
    sample: str = ""
    chain: bytes = b""
    created: float = 0.0
    used: float = 0.0
    uses: int = 0
    seconds: float = 0.0
    pending: bool = False
    session: str | None = None
    owner: str | None = None
    rewound: bool = False


@dataclass(frozen=True)
class SlotRow:
    """What a slot held when its last request of ours had ended.

    Attributes:
        server: the server's address.
        slot: its number.
        key: whose cache, None for nobody's.
        owner: the LiteLLM key of its tokens, None if not known.
        folder, route: as in `CacheRow`.
        task, tokens: what the server said then.
        dirty, whole, saved_tokens: as in `slot_cache.state.Resident`.
        model, boot: of the server that computed it, "" if not known.
        chain: the prompt's fingerprint.
        session, rewound: as in `CacheRow`.
    """

    server: str
    slot: int
    key: str | None
    owner: str | None
    folder: str
    route: str
    task: int
    tokens: int
    dirty: bool
    whole: bool
    saved_tokens: int
    model: str = ""
    boot: str = ""
    chain: bytes = b""
    session: str | None = None
    rewound: bool = False


class Index(ABC):
    """What is saved and what is in which slot. Plain calls that raise nothing; what cannot be read is not there."""

    @abstractmethod
    def cache(self, folder: str, key: str) -> list[CacheRow]:
        """What is known of a saved cache: nothing, its row, or two rows, of which the one that fits the file counts."""

    @abstractmethod
    def caches(self) -> list[CacheRow]:
        """Every saved cache, with pending rows."""

    @abstractmethod
    def overview(self) -> list[CacheRow]:
        """Every saved cache, without pending rows and without the chains, which are long."""

    @abstractmethod
    def changes(self) -> int:
        """A number that is another one when a cache was added or dropped since."""

    @abstractmethod
    def caches_of(self, folder: str, tag: str) -> list[CacheRow]:
        """Every saved cache of a route, without pending rows."""

    @abstractmethod
    def put_cache(self, row: CacheRow) -> bool:
        """Record a save. A row that is not pending takes the place of every row of the same cache.

        Returns:
            whether it is recorded now.
        """

    @abstractmethod
    def used_cache(self, folder: str, key: str, when: float) -> None:
        """Note a restore."""

    @abstractmethod
    def drop_cache(self, folder: str, key: str) -> None:
        """Forget a saved cache."""

    @abstractmethod
    def slot(self, server: str, slot: int) -> SlotRow | None:
        """What is in a slot, None if not known."""

    @abstractmethod
    def slots(self, server: str) -> list[SlotRow]:
        """What is in the slots of a server, as far as is known."""

    @abstractmethod
    def put_slot(self, row: SlotRow) -> None:
        """Record what is in a slot."""

    @abstractmethod
    def drop_slot(self, server: str, slot: int) -> None:
        """It is not known any more what is in a slot."""

    @abstractmethod
    def kind(self, model: str) -> str:
        """What was learned of a model, "" for nothing."""

    @abstractmethod
    def put_kind(self, model: str, kind: str) -> None:
        """Record what was learned of a model."""

    @abstractmethod
    def recomputed(self) -> list[Recomputed]:
        """The requests that reused less than they could, the newest first."""

    @abstractmethod
    def put_recomputed(self, note: Recomputed) -> None:
        """Record one of them; the oldest are forgotten."""

    @abstractmethod
    def close(self) -> None:
        """Let go of files. Calls after that find nothing."""


class MemoryIndex(Index):
    """An index for one process, gone with it."""

    def __init__(self) -> None:
        self._caches: dict[tuple[str, str], list[CacheRow]] = {}
        self._slots: dict[tuple[str, int], SlotRow] = {}
        self._kinds: dict[str, str] = {}
        self._recomputed: deque[Recomputed] = deque(maxlen=MOST_RECOMPUTED)
        self._changes = 0

    def cache(self, folder: str, key: str) -> list[CacheRow]:
        return list(self._caches.get((folder, key), ()))

    def caches(self) -> list[CacheRow]:
        return [row for rows in self._caches.values() for row in rows]

    def overview(self) -> list[CacheRow]:
        return [replace(row, chain=b"") for row in self.caches() if not row.pending]

    def changes(self) -> int:
        return self._changes

    def caches_of(self, folder: str, tag: str) -> list[CacheRow]:
        return [
            row for row in self.caches() if row.folder == folder and row.key.startswith(f"{tag}_") and not row.pending
        ]

    def put_cache(self, row: CacheRow) -> bool:
        self._changes += 1
        kept = [old for old in self._caches.get((row.folder, row.key), ()) if not old.pending] if row.pending else []
        self._caches[row.folder, row.key] = [*kept, row]
        return True

    def used_cache(self, folder: str, key: str, when: float) -> None:
        rows = self._caches.get((folder, key), [])
        rows[:] = [replace(row, used=when, uses=row.uses + 1) for row in rows]

    def drop_cache(self, folder: str, key: str) -> None:
        self._changes += 1
        self._caches.pop((folder, key), None)

    def slot(self, server: str, slot: int) -> SlotRow | None:
        return self._slots.get((server, slot))

    def slots(self, server: str) -> list[SlotRow]:
        return [row for row in self._slots.values() if row.server == server]

    def put_slot(self, row: SlotRow) -> None:
        self._slots[row.server, row.slot] = row

    def drop_slot(self, server: str, slot: int) -> None:
        self._slots.pop((server, slot), None)

    def kind(self, model: str) -> str:
        return self._kinds.get(model, "")

    def put_kind(self, model: str, kind: str) -> None:
        self._kinds[model] = kind

    def recomputed(self) -> list[Recomputed]:
        return list(reversed(self._recomputed))

    def put_recomputed(self, note: Recomputed) -> None:
        self._recomputed.append(note)

    def close(self) -> None:
        self._kinds.clear()
        self._recomputed.clear()
        self._caches.clear()
        self._slots.clear()


_CACHE_FIELDS = [field.name for field in fields(CacheRow)]
_SLOT_FIELDS = [field.name for field in fields(SlotRow)]
_RECOMPUTED_FIELDS = [field.name for field in fields(Recomputed)]

_MIGRATIONS = [
    # 0 -> 1
    [
        """
        CREATE TABLE caches (
            folder TEXT NOT NULL, key TEXT NOT NULL, route TEXT NOT NULL, model TEXT NOT NULL,
            tokens INTEGER NOT NULL, size INTEGER NOT NULL, checksum TEXT NOT NULL, sample TEXT NOT NULL,
            chain BLOB NOT NULL, created REAL NOT NULL, used REAL NOT NULL, uses INTEGER NOT NULL,
            seconds REAL NOT NULL, pending INTEGER NOT NULL, PRIMARY KEY (folder, key, pending)
        ) WITHOUT ROWID
        """,
        """
        CREATE TABLE slots (
            server TEXT NOT NULL, slot INTEGER NOT NULL, key TEXT, owner TEXT, folder TEXT NOT NULL, route TEXT NOT NULL,
            task INTEGER NOT NULL, tokens INTEGER NOT NULL, dirty INTEGER NOT NULL, whole INTEGER NOT NULL,
            saved_tokens INTEGER NOT NULL, model TEXT NOT NULL, boot TEXT NOT NULL, chain BLOB NOT NULL,
            PRIMARY KEY (server, slot)
        ) WITHOUT ROWID
        """,
    ],
    # 1 -> 2: several conversations of a session; until then each session had one, whose key was its own
    [
        "ALTER TABLE caches ADD COLUMN session TEXT",
        "ALTER TABLE caches ADD COLUMN owner TEXT",
        "ALTER TABLE caches ADD COLUMN rewound INTEGER NOT NULL DEFAULT 0",
        "ALTER TABLE slots ADD COLUMN session TEXT",
        "ALTER TABLE slots ADD COLUMN rewound INTEGER NOT NULL DEFAULT 0",
        "CREATE TABLE kinds (model TEXT NOT NULL PRIMARY KEY, kind TEXT NOT NULL) WITHOUT ROWID",
        "UPDATE caches SET session = key",
        "UPDATE slots SET session = key",
        "CREATE TABLE changes (number INTEGER NOT NULL)",
        "INSERT INTO changes VALUES (0)",
        "CREATE TRIGGER cache_added AFTER INSERT ON caches BEGIN UPDATE changes SET number = number + 1; END",
        "CREATE TRIGGER cache_dropped AFTER DELETE ON caches BEGIN UPDATE changes SET number = number + 1; END",
    ],
    # 2 -> 3: why requests were computed again
    [
        """
        CREATE TABLE recomputed (
            number INTEGER PRIMARY KEY, at REAL NOT NULL, key TEXT, session TEXT, owner TEXT NOT NULL, route TEXT NOT NULL,
            outcome TEXT NOT NULL, cause TEXT NOT NULL, words TEXT NOT NULL, message INTEGER, from_token INTEGER,
            reused INTEGER NOT NULL, computed INTEGER NOT NULL, again INTEGER NOT NULL, seconds REAL
        )
        """,
    ],
]


_Step = tuple[str, Sequence[object]]

_ERRORS = (sqlite3.Error, OverflowError, UnicodeError)
"""What a call on a database raises; the last two for values that SQLite has no place for."""


class SqliteIndex(Index):
    """An index in one SQLite database (WAL), shared by the processes of one machine.

    Args:
        path: the database file; it and its folder are made if absent, readable by their owner only.

    Raises:
        OSError, sqlite3.Error: there can be no database there at all.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._once = report.Once()
        self._file: tuple[int, int] | None = None
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            self._db: sqlite3.Connection | None = self._open()
        except sqlite3.DatabaseError as error:
            if not (_is_damage(error) or path.is_dir()):
                raise
            self._db = self._mend(error)

    def cache(self, folder: str, key: str) -> list[CacheRow]:
        rows = self._read("SELECT * FROM caches WHERE folder = ? AND key = ? ORDER BY pending", folder, key)
        return [_cache_row(row) for row in rows]

    def caches(self) -> list[CacheRow]:
        return [_cache_row(row) for row in self._read("SELECT * FROM caches ORDER BY folder, key, pending")]

    def overview(self) -> list[CacheRow]:
        names = ", ".join("x'' AS chain" if name == "chain" else name for name in _CACHE_FIELDS)
        return [
            _cache_row(row) for row in self._read(f"SELECT {names} FROM caches WHERE NOT pending ORDER BY folder, key")
        ]

    def changes(self) -> int:
        rows = self._read("SELECT number FROM changes")
        return int(rows[0][0]) if rows else -1

    def caches_of(self, folder: str, tag: str) -> list[CacheRow]:
        rows = self._read(
            "SELECT * FROM caches WHERE folder = ? AND key > ? AND key < ? AND NOT pending",
            folder,
            f"{tag}_",
            f"{tag}`",  # the character after _
        )
        return [_cache_row(row) for row in rows]

    def put_cache(self, row: CacheRow) -> bool:
        values = [getattr(row, name) for name in _CACHE_FIELDS]
        steps: list[_Step] = [(_insert("caches", _CACHE_FIELDS), values)]
        if not row.pending:
            steps.insert(0, ("DELETE FROM caches WHERE folder = ? AND key = ?", (row.folder, row.key)))
        return self._write(*steps)

    def used_cache(self, folder: str, key: str, when: float) -> None:
        self._write(("UPDATE caches SET used = ?, uses = uses + 1 WHERE folder = ? AND key = ?", (when, folder, key)))

    def drop_cache(self, folder: str, key: str) -> None:
        self._write(("DELETE FROM caches WHERE folder = ? AND key = ?", (folder, key)))

    def slot(self, server: str, slot: int) -> SlotRow | None:
        rows = self._read("SELECT * FROM slots WHERE server = ? AND slot = ?", server, slot)
        return _slot_row(rows[0]) if rows else None

    def slots(self, server: str) -> list[SlotRow]:
        return [_slot_row(row) for row in self._read("SELECT * FROM slots WHERE server = ? ORDER BY slot", server)]

    def put_slot(self, row: SlotRow) -> None:
        self._write((_insert("slots", _SLOT_FIELDS), [getattr(row, name) for name in _SLOT_FIELDS]))

    def drop_slot(self, server: str, slot: int) -> None:
        self._write(("DELETE FROM slots WHERE server = ? AND slot = ?", (server, slot)))

    def kind(self, model: str) -> str:
        rows = self._read("SELECT kind FROM kinds WHERE model = ?", model)
        return str(rows[0][0]) if rows else ""

    def put_kind(self, model: str, kind: str) -> None:
        self._write(("INSERT OR REPLACE INTO kinds VALUES (?, ?)", (model, kind)))

    def recomputed(self) -> list[Recomputed]:
        rows = self._read("SELECT * FROM recomputed ORDER BY number DESC")
        return [Recomputed(**{name: row[name] for name in _RECOMPUTED_FIELDS}) for row in rows]

    def put_recomputed(self, note: Recomputed) -> None:
        values = [getattr(note, name) for name in _RECOMPUTED_FIELDS]
        oldest = "DELETE FROM recomputed WHERE number <= (SELECT MAX(number) FROM recomputed) - ?"
        self._write((_insert("recomputed", _RECOMPUTED_FIELDS), values), (oldest, (MOST_RECOMPUTED,)))

    def close(self) -> None:
        if self._db is not None:
            self._db.close()
            self._db = None

    def _open(self) -> sqlite3.Connection:
        db = sqlite3.connect(self.path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
        try:
            db.row_factory = sqlite3.Row
            self._file = _file_identity(self.path)
            with contextlib.suppress(OSError):
                self.path.chmod(0o600)
            _use_wal(db)
            db.execute("PRAGMA synchronous = NORMAL")
            _migrate(db)
        except BaseException:
            db.close()
            raise
        return db

    def _mend(self, error: Exception) -> sqlite3.Connection:
        """Put a damaged database aside and make a new one; or take that which another process has made meanwhile."""
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError, portalocker.exceptions.LockException):
                file = stack.enter_context(self.path.with_name(f"{self.path.name}.mend").open("ab"))
                portalocker.lock(file, portalocker.LockFlags.EXCLUSIVE)
            if self._file is None or self._file == _file_identity(self.path):
                aside = self.path.with_name(f"{self.path.name}.damaged-{int(time.time())}")
                report.logger.warning("slot-cache: the index is damaged (%s) and made anew", type(error).__name__)
                for ending in ("", "-wal", "-shm"):
                    with contextlib.suppress(OSError):
                        os.replace(f"{self.path}{ending}", f"{aside}{ending}")  # noqa: PTH105 - three files of one name
            return self._open()

    def _read(self, sql: str, *values: object) -> list[sqlite3.Row]:
        if self._db is None:
            return []
        try:
            rows: list[sqlite3.Row] = self._db.execute(sql, values).fetchall()
        except _ERRORS as error:
            self._failed("read", error)
            return []
        self._once.over(("index", "read"))
        return rows

    def _write(self, *steps: _Step) -> bool:
        """A transaction; what fails is not written, and said once. Returns whether it is written."""
        db = self._db
        if db is None:
            return False
        try:
            db.execute("BEGIN IMMEDIATE")
            try:
                for sql, values in steps:
                    db.execute(sql, values)
            except BaseException:
                db.execute("ROLLBACK")
                raise
            db.execute("COMMIT")
        except _ERRORS as error:
            self._failed("written", error)
            return False
        self._once.over(("index", "written"))
        return True

    def _failed(self, what: str, error: Exception) -> None:
        if not _is_damage(error):
            self._once.warn(("index", what), "the index cannot be %s right now: %s", what, type(error).__name__)
            return
        self.close()
        try:
            self._db = self._mend(error)
        except (OSError, sqlite3.Error) as again:
            report.logger.warning("slot-cache: the index cannot be made anew: %s", type(again).__name__)


def open_index(state_dir: Path | None) -> Index:
    """The index in `state_dir` (None: the default folder), or one in memory, said once, where there can be none."""
    try:
        return SqliteIndex((state_dir or default_state_dir()) / "index.sqlite3")
    except (OSError, sqlite3.Error, RuntimeError) as error:
        report.logger.warning(
            "slot-cache: no index in the state folder (%s): what is saved is known until the proxy ends",
            type(error).__name__,
        )
        return MemoryIndex()


def default_state_dir() -> Path:
    """`$XDG_STATE_HOME/slot-cache`, else `~/.local/state/slot-cache`. Raises RuntimeError where there is no home."""
    home = os.environ.get("XDG_STATE_HOME", "")
    base = Path(home) if home.startswith("/") else Path.home() / ".local" / "state"
    return base / "slot-cache"


class IndexThread:
    """Runs an index's calls in one thread of their own, in the order in which they were made."""

    def __init__(self, index: Index) -> None:
        self.index = index
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="slot-cache-index")

    async def call(self, function: Callable[..., _T], *args: object) -> _T:
        """`function(*args)`, a method of the index, in its thread."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, lambda: function(*args))

    def close(self) -> None:
        """Close the index when the calls made so far are done. Does not wait."""
        self._executor.submit(self.index.close)
        self._executor.shutdown(wait=False)


def _use_wal(db: sqlite3.Connection) -> None:
    """Switch to WAL. SQLite does not wait for another process that is just doing the same, so it is tried again."""
    end = time.monotonic() + 4 * BUSY_SECONDS
    while True:
        try:
            db.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError:
            if time.monotonic() > end:
                raise
            time.sleep(0.02)


def _file_identity(path: Path) -> tuple[int, int] | None:
    try:
        info = path.stat()
    except OSError:
        return None
    return info.st_dev, info.st_ino


def _migrate(db: sqlite3.Connection) -> None:
    """Bring the schema up to date. A database of a newer version is left as it is, and not used."""
    version = db.execute("PRAGMA user_version").fetchone()[0]
    if version > SCHEMA:
        raise sqlite3.OperationalError(f"the index has schema {version}, this version knows {SCHEMA}")
    if version == SCHEMA:
        return
    db.execute("BEGIN IMMEDIATE")
    try:
        version = db.execute("PRAGMA user_version").fetchone()[0]  # another process may have been faster
        for statements in _MIGRATIONS[version:SCHEMA]:
            for statement in statements:
                db.execute(statement)
        db.execute(f"PRAGMA user_version = {SCHEMA}")
        db.execute("COMMIT")
    except BaseException:
        db.execute("ROLLBACK")
        raise


def _is_damage(error: Exception) -> bool:
    """Whether the file is no (whole) database, as against a lock, a full disk, a read-only folder or an odd value."""
    if isinstance(error, sqlite3.OperationalError):
        return any(words in str(error) for words in ("no such table", "no such column", "has no column"))
    return type(error) is sqlite3.DatabaseError


def _insert(table: str, names: list[str]) -> str:
    return f"INSERT OR REPLACE INTO {table} ({', '.join(names)}) VALUES ({', '.join('?' * len(names))})"


def _cache_row(row: sqlite3.Row) -> CacheRow:
    values = {name: row[name] for name in _CACHE_FIELDS}
    return CacheRow(**{**values, "pending": bool(values["pending"]), "rewound": bool(values["rewound"])})


def _slot_row(row: sqlite3.Row) -> SlotRow:
    values = {name: row[name] for name in _SLOT_FIELDS}
    return SlotRow(**{**values, **{name: bool(values[name]) for name in ("dirty", "whole", "rewound")}})
