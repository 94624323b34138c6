"""Which model a server runs: what makes another one of it, and what does not."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fake_llama_api import models, props
from slot_cache.model import Identity, boot_of, identity_of

PROPS = props(model="/models/a.gguf", n_ctx=4096, slots=1, slots_endpoint=True, is_sleeping=False)
ENTRY = models(model="/models/a.gguf", n_ctx=4096)["data"][0]
META = ENTRY["meta"]


def changed(value: Mapping[str, Any], *path: str | int, to: Any) -> dict[str, Any]:
    copied: Any = copy.deepcopy(value)
    inner = copied
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = to
    return copied  # type: ignore[no-any-return]


def without(value: Mapping[str, Any], *path: str | int) -> dict[str, Any]:
    copied: Any = copy.deepcopy(value)
    inner = copied
    for step in path[:-1]:
        inner = inner[step]
    del inner[path[-1]]
    return copied  # type: ignore[no-any-return]


def test_the_same_answers_are_the_same_model() -> None:
    one = identity_of(PROPS, ENTRY)
    assert identity_of(copy.deepcopy(PROPS), copy.deepcopy(ENTRY)) == one
    assert len(one.model) == 32 and set(one.model) <= set("0123456789abcdef")
    assert one.name == "a.gguf" and one.sleeping is False and one.boot


def test_the_order_of_fields_does_not_count() -> None:
    turned = changed(ENTRY, "meta", to=dict(reversed(META.items())))
    assert identity_of(dict(reversed(PROPS.items())), turned) == identity_of(PROPS, ENTRY)


@pytest.mark.parametrize(
    ("name", "to"),
    [
        ("model_path", "/models/b.gguf"),
        ("model_path", "/models/A.gguf"),
        ("model_path", ""),
        ("model_path", None),
        ("model_ftype", "Q4_0"),
        ("model_ftype", None),
        ("chat_template", "another"),
        ("chat_template", ""),
        ("chat_template", None),
    ],
)
def test_each_field_of_props_makes_another_model(name: str, to: Any) -> None:
    assert identity_of(changed(PROPS, name, to=to), ENTRY).model != identity_of(PROPS, ENTRY).model


@pytest.mark.parametrize("name", ["n_params", "size", "n_vocab", "n_embd", "n_ctx_train", "ftype", "vocab_type"])
def test_each_number_of_the_model_makes_another_model(name: str) -> None:
    assert name in META
    good = identity_of(PROPS, ENTRY).model
    other = {*(identity_of(PROPS, changed(ENTRY, "meta", name, to=to)).model for to in (1, "1", None, [1]))}
    assert len(other) == 4 and good not in other
    assert identity_of(PROPS, without(ENTRY, "meta", name)).model != good


@pytest.mark.parametrize(
    ("answer", "path", "to"),
    [
        (PROPS, ("total_slots",), 4),
        (PROPS, ("build_info",), "b999"),
        (PROPS, ("default_generation_settings", "params", "temperature"), 0.1),
        (PROPS, ("is_sleeping",), True),
        (PROPS, ("media_marker",), "<__media_zzz__>"),
        (PROPS, ("model_alias",), "another name"),
        (ENTRY, ("created",), 1),
        (ENTRY, ("id",), "another name"),
        (ENTRY, ("meta", "n_ctx"), 8192),
    ],
)
def test_what_does_not_change_the_cache_does_not_count(answer: Any, path: tuple[str | int, ...], to: Any) -> None:
    other = changed(answer, *path, to=to)
    found = identity_of(other, ENTRY) if answer is PROPS else identity_of(PROPS, other)
    assert found.model == identity_of(PROPS, ENTRY).model


def test_a_field_does_not_stand_in_for_another() -> None:
    """The parts are told apart: moving a value from one to the other is a change."""
    one = changed(changed(PROPS, "model_path", to="x"), "model_ftype", to="y")
    other = changed(changed(PROPS, "model_path", to="y"), "model_ftype", to="x")
    assert identity_of(one, ENTRY).model != identity_of(other, ENTRY).model


def test_a_file_put_in_its_place_is_another_model(tmp_path: Path) -> None:
    file = tmp_path / "a.gguf"
    file.write_bytes(b"x" * 100)
    os.utime(file, ns=(10**18, 10**18))
    here = changed(PROPS, "model_path", to=str(file))
    seen = [identity_of(here, ENTRY).model]
    os.utime(file, ns=(10**18, 10**18 + 1))  # the time alone
    seen.append(identity_of(here, ENTRY).model)
    file.write_bytes(b"x" * 101)  # the size alone
    os.utime(file, ns=(10**18, 10**18))
    seen.append(identity_of(here, ENTRY).model)
    file.unlink()
    seen.append(identity_of(here, ENTRY).model)
    assert len(set(seen)) == 4
    file.write_bytes(b"y" * 100)
    os.utime(file, ns=(10**18, 10**18))
    assert identity_of(here, ENTRY).model == seen[0]  # as far as that can be seen


def test_a_link_is_the_file_that_it_leads_to(tmp_path: Path) -> None:
    for name, size in (("one", 1), ("two", 2)):
        (tmp_path / name).write_bytes(b"x" * size)
        os.utime(tmp_path / name, ns=(10**18, 10**18))
    link = tmp_path / "model.gguf"
    link.symlink_to(tmp_path / "one")
    here = changed(PROPS, "model_path", to=str(link))
    before = identity_of(here, ENTRY).model
    link.unlink()
    link.symlink_to(tmp_path / "two")
    assert identity_of(here, ENTRY).model != before


def test_a_relative_path_is_not_looked_for_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    here = changed(PROPS, "model_path", to="model.gguf")
    before = identity_of(here, ENTRY).model
    (tmp_path / "model.gguf").write_bytes(b"x")  # the server's folder need not be ours
    assert identity_of(here, ENTRY).model == before


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/models/a.gguf", "a.gguf"),
        ("a.gguf", "a.gguf"),
        ("C:\\models\\a.gguf", "a.gguf"),
        ("/models/", ""),
        ("", ""),
        ("/models/\N{SNOWMAN}.gguf", "\N{SNOWMAN}.gguf"),
    ],
)
def test_the_name_is_that_of_the_file(path: str, name: str) -> None:
    assert identity_of(changed(PROPS, "model_path", to=path), ENTRY).name == name


def test_a_server_may_sleep() -> None:
    assert identity_of(changed(PROPS, "is_sleeping", to=True), ENTRY).sleeping is True
    assert identity_of(changed(PROPS, "is_sleeping", to="yes"), ENTRY).sleeping is False
    assert identity_of(without(PROPS, "is_sleeping"), ENTRY).sleeping is False


@pytest.mark.parametrize(
    ("marker", "boot"),
    [
        ("<__media_abc__>", "<__media_abc__>"),
        ("<__media__>", ""),  # of builds that do not draw it
        ("", ""),
        (None, ""),
        (7, ""),
        (["<__media_abc__>"], ""),
    ],
)
def test_the_boot_is_the_marker_that_is_drawn_at_the_start(marker: Any, boot: str) -> None:
    told = changed(PROPS, "media_marker", to=marker)
    assert boot_of(told) == identity_of(told, ENTRY).boot == boot
    assert boot_of({}) == ""


@pytest.mark.parametrize(
    "answer",
    [{}, {"id": "x"}, {"data": []}, {"error": {"message": "x"}}]
    + [{"meta": meta} for meta in (None, [], "x", 7, {}, {"size": {"size": []}})],
)
def test_a_server_that_does_not_tell_of_its_model_has_an_identity_all_the_same(answer: Any) -> None:
    assert identity_of(PROPS, answer) == identity_of(PROPS, copy.deepcopy(answer))
    assert identity_of({}, answer).model


def test_less_told_is_another_model() -> None:
    assert len({identity_of(*told).model for told in ((PROPS, ENTRY), (PROPS, {}), ({}, ENTRY), ({}, {}))}) == 4


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
_hostile_paths = st.sampled_from(
    ["/", "//", "/dev/null", "/proc/self/mem", "/\0", "/a\0b", "/" + "x" * 5000, "/\ud800", "/..", "~", "/dev/stdin/x"]
)


@given(
    told=st.fixed_dictionaries(
        {},
        optional={
            "model_path": _json | _hostile_paths,
            "model_ftype": _json,
            "chat_template": _json,
            "media_marker": _json,
            "is_sleeping": _json,
        },
    ),
    answer=st.dictionaries(st.sampled_from(["id", "meta", "object"]), _json, max_size=3)
    | st.builds(lambda size: {"meta": {"size": size, "n_params": size}}, _json),
)
def test_whatever_a_server_says_there_is_an_identity(told: dict[str, Any], answer: dict[str, Any]) -> None:
    found = identity_of(told, answer)
    assert isinstance(found, Identity)
    assert len(found.model) == 32
    assert isinstance(found.boot, str) and isinstance(found.name, str) and isinstance(found.sleeping, bool)
    assert identity_of(told, answer) == found


@given(answer=_json)
def test_what_came_as_json_makes_the_same_identity_each_time(answer: Any) -> None:
    text = json.dumps({"meta": {"n_params": answer, "size": answer}})
    assert identity_of(PROPS, json.loads(text)) == identity_of(PROPS, json.loads(text))
