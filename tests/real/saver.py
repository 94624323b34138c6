"""A process that switches conversations through one slot as the proxy does, without LiteLLM, until it is killed.

usage: python saver.py BASE_URL FOLDER SEED     (prints a line after each request; FOLDER/saved is the server's save path)
"""

from __future__ import annotations

import asyncio
import random
import sys
from pathlib import Path

import httpx

from slot_cache.folder import CacheFolder
from slot_cache.index import IndexThread, open_index
from slot_cache.llama_server import LlamaServer, same_server_key
from slot_cache.state import Ending, Want
from slot_cache.switcher import SlotSwitcher

NAMES = "ABC"
TAG = "route-00000000"


def key(name: str) -> str:
    return f"{TAG}_{ord(name):032x}"


def prompt(name: str, length: int) -> str:
    """A conversation that only grows: no two names share more than their first character."""
    return f"{name}: {f'{name} goes on and on. ' * 400}"[: 200 + length]


async def main(base_url: str, folder: Path, seed: int) -> None:
    pick = random.Random(seed)
    index = IndexThread(open_index(folder / "state"))
    server = LlamaServer(base_url)
    name = same_server_key(base_url)
    switcher = SlotSwitcher(server, index, name=name, lock_folder=folder / "state")
    caches = CacheFolder(index, tag=TAG, route="route", server=name, path=folder / "saved")
    async with httpx.AsyncClient(base_url=base_url, timeout=60) as client:
        while True:
            who = pick.choice(NAMES)
            text = prompt(who, pick.randrange(300))
            lease = await switcher.acquire(0, Want(key(who)), caches, queue_seconds=60)
            try:
                body = {"prompt": text, "n_predict": 8, "temperature": 0, "id_slot": lease.slot, "cache_prompt": True}
                answer = (await client.post("/completion", json=body)).json()
            finally:
                lease.release(Ending.ANSWERED)
            print(f"{lease.granted.outcome.value}\t{text}\t{answer['content']}", flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])))
