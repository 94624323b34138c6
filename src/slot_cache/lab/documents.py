"""Long texts to talk about, made up here: the same seed gives the same text, another seed another one from the first words on."""

from __future__ import annotations

import random

_PLACES = (
    "the harbour|the north field|the boiler room|the long pier|the lower orchard|the press hall|the old mill|the annex"
)
_PEOPLE = "the keeper|Ines|the night crew|old Tomasz|the apprentice|Mrs. Adeyemi|the pilot|two visitors|the cook|Ravi"
_ACTS = "repaired|measured|counted|moved|painted|inspected|cleaned|weighed|labelled|covered|lent out|took apart"
_THINGS = (
    "the brass lamp|seven crates of pears|the spare rudder|a sack of lime|the weather glass|three coils of rope|the ledger"
    "|the second pump|a box of type|the beehives|the copper kettle|the sluice gate"
)
_WHENS = "before sunrise|at noon|in the first frost|after the storm|on market day|late in the evening|between two tides"
_WHYS = (
    "because the key was missing|so that the inspector could see it|although it rained|as the almanac advises"
    "|and wrote the result on the door|and nobody asked why|for the third time that month|to settle a bet"
)
# Measured with the tokenizer of SmolLM2; others are near enough.
TOKENS_PER_SENTENCE = 29


def document(seed: str, *, sentences: int) -> str:
    """A chronicle of `sentences` sentences, about 29 tokens each."""
    rng = random.Random(seed)

    def pick(words: str) -> str:
        return rng.choice(words.split("|"))

    lines = [f"Chronicle {seed}."]
    for _ in range(sentences):
        day = f"Day {rng.randint(1, 999)}"
        line = (
            f"{day}: {pick(_WHENS)}, in {pick(_PLACES)}, {pick(_PEOPLE)} {pick(_ACTS)} {pick(_THINGS)} {pick(_WHYS)}."
        )
        lines.append(line)
    return "\n".join(lines)
