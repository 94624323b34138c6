"""The child process of EmbeddedServer: `python -m slot_cache.lab.server_process OPTIONS_JSON PORT`.

It serves until its stdin ends. The parent holds the other end of that pipe and never writes: when the parent is gone, for
whatever reason, the pipe ends and so does the server.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from typing import Any


def main(options: dict[str, Any], port: int) -> None:
    watcher = threading.Thread(target=_exit_at_end_of_stdin, daemon=True)
    watcher.start()
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = options["model"]
    params.hostnames = ["127.0.0.1"]
    params.port = port
    params.endpoint_props = True
    params.endpoint_metrics = True
    params.n_ctx = options["ctx"]
    params.n_parallel = options["slots"]
    if options["save_path"] is not None:
        params.slot_save_path = options["save_path"].rstrip("/") + "/"  # the server joins it with the name as it is
    names = "cache_ram_mib kv_unified swa_full sleep_idle_seconds endpoint_slots verbosity warmup"
    for name in names.split():
        setattr(params, name, options[name])
    for name in ("cache_idle_slots", "n_batch", "n_ubatch"):
        if options[name] is not None:
            setattr(params, name, options[name])
    if options["api_keys"]:
        params.api_keys = list(options["api_keys"])
    if options["threads"] is not None:
        params.cpuparams.n_threads = options["threads"]
        params.cpuparams_batch.n_threads = options["threads"]
    server = xllamacpp.Server(params)
    print(f"listening on {server.listening_address}", flush=True)
    watcher.join()


def _exit_at_end_of_stdin() -> None:
    while os.read(0, 4096):
        pass
    os._exit(0)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), int(sys.argv[2]))
