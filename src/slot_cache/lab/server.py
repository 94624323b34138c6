"""llama.cpp's real HTTP server in a process that can be killed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

from slot_cache.lab.process import child_environment, close_and_wait, free_port, wait_until_healthy

START_SECONDS = 120.0
STOP_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """llama-server's options, by what they mean; None leaves one at the server's own default.

    model             path of the GGUF file
    ctx               --ctx-size: tokens of all slots together
    slots             --parallel
    save_path         --slot-save-path, made if absent; None: the server refuses to save and restore
    cache_ram_mib     --cache-ram in MiB; 0 is none
    kv_unified        --kv-unified: the slots share one KV buffer
    cache_idle_slots  --cache-idle-slots: clear idle slots when a task starts
    swa_full          --swa-full
    sleep_idle_seconds  --sleep-idle-seconds; -1 is never
    api_keys          --api-key, one or several
    endpoint_slots    False is --no-slots
    verbosity         -lv
    threads           -t
    n_batch, n_ubatch --batch-size, --ubatch-size, in tokens
    warmup            one empty run at the start
    port              0: a free one, chosen once and kept over restarts
    """

    model: str | Path
    ctx: int = 4096
    slots: int = 1
    save_path: str | Path | None = None
    cache_ram_mib: int = 0
    kv_unified: bool = False
    cache_idle_slots: bool | None = None
    swa_full: bool = False
    sleep_idle_seconds: int = -1
    api_keys: tuple[str, ...] = ()
    endpoint_slots: bool = True
    verbosity: int = 3
    threads: int | None = None
    n_batch: int | None = None
    n_ubatch: int | None = None
    warmup: bool = False
    port: int = 0

    def to_json(self) -> str:
        """The options for the child process, with paths as absolute strings."""
        values = asdict(self)
        values["model"] = str(Path(self.model).absolute())
        values["save_path"] = None if self.save_path is None else str(Path(self.save_path).absolute())
        return json.dumps(values)


class EmbeddedServer:
    """A llama-server that this process owns: it ends with `stop`, at once with `kill`, and whenever this process ends.

    start() after stop() or kill() starts it again on the same port, with what is saved on disk and nothing else.
    Logs and whatever else it writes go to `folder`, a temporary one that goes with `close` unless one is given.
    """

    def __init__(self, options: ServerOptions, *, folder: Path | None = None) -> None:
        self.options = options
        self.port = options.port or free_port()
        self.base_url = f"http://127.0.0.1:{self.port}"
        self._own_folder = folder is None
        self.folder = folder or Path(tempfile.mkdtemp(prefix="slot-cache-server-"))
        self.log_path = self.folder / f"llama-server-{self.port}.log"
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """The process id of the running server."""
        return self._child.pid if self._child else None

    @property
    def running(self) -> bool:
        return self._child is not None and self._child.poll() is None

    def start(self, timeout: float = START_SECONDS) -> None:
        """Start it and wait, at most `timeout` seconds, until the model is loaded. Raises StartError.

        Does nothing when it is running.
        """
        if self.running:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.options.save_path is not None:
            Path(self.options.save_path).mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "slot_cache.lab.server_process", self.options.to_json(), str(self.port)]
        with self.log_path.open("ab") as log:
            self._child = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                env=child_environment({}, drop=("LLAMA_ARG_",)),
                start_new_session=True,
            )
        try:
            wait_until_healthy("llama-server", f"{self.base_url}/health", lambda: self.running, self.log_path, timeout)
        except BaseException:
            self.kill()
            raise

    def kill(self) -> None:
        """End it with SIGKILL, as a crash or the kernel's out-of-memory killer does."""
        if self._child is not None:
            self._child.kill()
            close_and_wait(self._child, STOP_SECONDS)
            self._child = None

    def stop(self) -> None:
        """Ask it to end, and end it if it does not within a few seconds."""
        if self._child is not None and not close_and_wait(self._child, STOP_SECONDS):
            self.kill()
        self._child = None

    def close(self) -> None:
        """Stop it and remove its temporary folder."""
        self.kill()
        if self._own_folder:
            shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> EmbeddedServer:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
