"""A made-up trace: conversations with shared beginnings, of a few long ones and many short ones, in Mooncake's format."""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from itertools import count, islice
from typing import Any

BLOCK = 512


def make_trace(requests: int, *, seed: int = 0, per_minute: float = 10.0, programs: int = 5) -> list[dict[str, Any]]:
    """So many requests, always the same for a seed.

    Every fifth conversation is an agent's: it begins with a long system message that its program always sends, and grows
    by thousands of tokens in up to 30 turns. The others are chats: short, a few turns, minutes between them.
    """
    chance = random.Random(seed)
    ids = count()
    preambles = [list(islice(ids, chance.randint(4, 16))) for _ in range(programs)]
    rows: list[dict[str, Any]] = []
    start = 0.0
    while len(rows) < 2 * requests:  # those that begin late are cut off by those that have begun
        agent = chance.random() < 0.2
        turns = chance.randint(8, 30) if agent else chance.randint(1, 6)
        start += chance.expovariate(per_minute / 60 / 6) * 1000
        rows += _conversation(chance, ids, list(chance.choice(preambles)) if agent else [], agent, turns, start)
    rows.sort(key=lambda row: row["timestamp"])
    return rows[:requests]


def _conversation(
    chance: random.Random, ids: Iterator[int], blocks: list[int], agent: bool, turns: int, start: float
) -> Iterator[dict[str, Any]]:
    time = start
    for _ in range(turns):
        blocks += islice(ids, chance.randint(2, 10) if agent else chance.randint(1, 3))
        rest = chance.randint(1, BLOCK - 1)  # of a block that the next turn fills
        yield {
            "timestamp": int(time),
            "input_length": len(blocks) * BLOCK + rest,
            "output_length": chance.randint(20, 400),
            "hash_ids": [*blocks, next(ids)],
        }
        time += chance.expovariate(1 / 60_000 if agent else 1 / 180_000) + 5000


def main() -> None:
    """Print a trace: `python tests/traces.py 2000 --seed 1 > trace.jsonl`."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("requests", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--per-minute", type=float, default=10.0)
    arguments = parser.parse_args()
    for row in make_trace(arguments.requests, seed=arguments.seed, per_minute=arguments.per_minute):
        print(json.dumps(row))


if __name__ == "__main__":
    main()
