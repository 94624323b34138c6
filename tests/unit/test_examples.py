"""README, docs/, config.example.yaml and examples/ say what the code does: options, defaults, commands, links."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from slot_cache import __version__
from slot_cache.cli import _parser, monitor
from slot_cache.settings import ENVIRONMENT, SESSION_HEADERS, Settings, asks_for_it, read_settings
from slot_cache.state import Outcome
from slot_cache.steady import READY
from slot_cache.steady_settings import SteadySettings

TOP = Path(__file__).resolve().parents[2]
README = TOP / "README.md"
CHINESE = TOP / "README.zh-CN.md"
DOCS = sorted((TOP / "docs").glob("*.md"))
CONFIG = TOP / "config.example.yaml"
CLAUDE_CODE = TOP / "examples" / "claude-code"
YAML_FILES = [CONFIG, *sorted((TOP / "examples").rglob("*.yaml"))]
PROXY_CONFIGS = [path for path in YAML_FILES if path.name != "compose.yaml"]
TEXTS = [
    README,
    CHINESE,
    *DOCS,
    TOP / "CHANGELOG.md",
    TOP / "examples" / "README.md",
    TOP / "examples" / "Dockerfile",
    CLAUDE_CODE / "README.md",
    CLAUDE_CODE / "settings.json",
    *YAML_FILES,
]
MARKDOWN = [path for path in TEXTS if path.suffix == ".md"]


def relative(path: Path) -> str:
    return str(path.relative_to(TOP))


def load(path: Path) -> dict[str, Any]:
    loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert isinstance(loaded, dict)
    return loaded


def managed(config: Mapping[str, Any]) -> dict[str, object]:
    """What each managed route of a proxy's configuration asks for."""
    asked = {entry["model_name"]: entry.get("model_info", {}).get("slot_cache") for entry in config["model_list"]}
    assert len(asked) == len(config["model_list"])
    return {route: raw for route, raw in asked.items() if asks_for_it(raw)}


def given_default(option: str) -> str:
    """An option's default as the documentation writes it."""
    default = Settings.model_fields[option].default
    if option == "session_headers":
        assert default == SESSION_HEADERS
        return ", ".join(default)
    if isinstance(default, float):  # 0, not 0.0
        return f"{default:g}"
    if option == "steady":
        assert default == SteadySettings(claude_code=True, rules=())
        return "claude_code: true"
    if option == "state_dir":
        assert default is None
        return "$XDG_STATE_HOME/slot-cache, else ~/.local/state/slot-cache"
    return "none" if default is None else str(default)


# the configurations


@pytest.mark.parametrize("path", PROXY_CONFIGS, ids=relative)
def test_a_proxy_configuration_is_valid(path: Path) -> None:
    config = load(path)
    routes = managed(config)
    assert routes
    for route, raw in routes.items():
        read_settings(route, raw, {})
    for entry in config["model_list"]:
        params = entry["litellm_params"]
        assert params["model"].startswith("openai/")
        assert re.fullmatch(r"http://[a-z0-9.-]+:\d+/v1", params["api_base"])
        assert params["api_key"]
    assert config["litellm_settings"]["callbacks"] == "slot_cache.proxy_handler_instance"
    assert config["general_settings"]["master_key"] == "os.environ/LITELLM_MASTER_KEY"


def test_the_routes_of_an_example_have_a_slot_each() -> None:
    for path in PROXY_CONFIGS:
        config = load(path)
        bases = {entry["model_name"]: entry["litellm_params"]["api_base"] for entry in config["model_list"]}
        used = [(bases[route], read_settings(route, raw, {}).slot) for route, raw in managed(config).items()]
        assert len(set(used)) == len(used), relative(path)


def test_the_callback_is_the_one_of_the_package() -> None:
    module, _, name = load(CONFIG)["litellm_settings"]["callbacks"].partition(".")
    exported = __import__(module).__all__
    assert name in exported


def with_all_options() -> dict[str, Any]:
    """The example configuration with its options that are commented out switched on."""
    text = re.sub(r"(?m)^( +)# ([a-z_]+: \S+)$", r"\1\2", CONFIG.read_text(encoding="utf-8"))
    loaded = yaml.safe_load(text)
    assert isinstance(loaded, dict)
    return loaded


def test_the_example_configuration_has_every_option() -> None:
    (raw,) = managed(with_all_options()).values()
    assert isinstance(raw, dict)
    assert set(raw) == set(Settings.model_fields)
    for other in ("slot", "slots"):  # one stands in place of the other
        read_settings("example", {option: value for option, value in raw.items() if option != other}, {})


def test_the_example_configuration_tells_variable_and_default_of_every_option() -> None:
    _, _, options = CONFIG.read_text(encoding="utf-8").partition("slot_cache:\n")
    lines = options.splitlines()
    for option in Settings.model_fields:
        (number,) = (n for n, line in enumerate(lines) if re.match(rf"\s+(# )?{option}: ", line))
        comment = []
        while lines[number - 1].strip().startswith("#"):
            number -= 1
            comment.insert(0, lines[number].strip().removeprefix("#").strip())
        told = re.search(r"\[([A-Z_-]+); ([^\]]+)\]$", " ".join(comment))
        assert told, option
        assert told[1] == ENVIRONMENT.get(option, "-"), option
        assert told[2].lower() == given_default(option).lower(), option


# compose


def test_compose_shares_the_folder_of_saved_caches() -> None:
    compose = load(TOP / "examples" / "compose.yaml")
    server, proxy = compose["services"]["llama-server"], compose["services"]["litellm"]
    targets = {volume.split(":")[0]: volume.split(":")[1] for volume in server["volumes"]}
    command = server["command"]
    saved = command[command.index("--slot-save-path") + 1]
    assert targets["slot-cache"] == saved
    assert command[command.index("--model") + 1].startswith(targets["./models"] + "/")
    seen = {volume.split(":")[0]: volume.split(":")[1] for volume in proxy["volumes"]}
    assert seen["./models"] == targets["./models"]  # else the fingerprint of the model lacks the file's own state

    config = load(TOP / "examples" / "compose-config.yaml")
    (raw,) = managed(config).values()
    settings = read_settings("compose", raw, {})
    assert str(settings.save_path) == seen["slot-cache"]
    assert str(settings.state_dir) == seen["state"]
    assert set(compose["volumes"]) == {"slot-cache", "state"}
    assert proxy["command"][proxy["command"].index("--config") + 1] == seen["./compose-config.yaml"]
    for entry in config["model_list"]:
        assert entry["litellm_params"]["api_base"] == "http://llama-server:8080/v1"


def test_compose_builds_from_files_that_are_there() -> None:
    compose = load(TOP / "examples" / "compose.yaml")
    build = compose["services"]["litellm"]["build"]
    context = (TOP / "examples" / build["context"]).resolve()
    assert context == TOP
    dockerfile = context / build["dockerfile"]
    for line in dockerfile.read_text(encoding="utf-8").splitlines():
        if line.startswith("COPY "):
            for name in line.split()[1:-1]:
                assert (context / name).exists(), name
    for service in compose["services"].values():
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            if source.startswith("./") and source != "./models":
                assert (TOP / "examples" / source).is_file(), source


def test_the_proxy_of_the_image_is_the_one_that_the_tests_use() -> None:
    pinned = re.compile(r"litellm\[proxy\]==([0-9.]+)")
    image = pinned.search((TOP / "examples" / "Dockerfile").read_text(encoding="utf-8"))
    extra = pinned.search((TOP / "pyproject.toml").read_text(encoding="utf-8"))
    assert image and extra
    assert image[1] == extra[1]


def compose_command() -> list[str] | None:
    """Docker's own compose, as a plugin or alone, where it is installed."""
    for command in (["docker", "compose"], ["docker-compose"], [str(Path(sys.executable).parent / "docker-compose")]):
        program = shutil.which(command[0])
        if program is not None:
            found = subprocess.run([program, *command[1:], "version"], capture_output=True, timeout=30, check=False)
            if found.returncode == 0:
                return [program, *command[1:]]
    return None


def test_docker_compose_takes_the_file() -> None:
    command = compose_command()
    if command is None:
        pytest.skip("docker compose is not installed: compose.yaml is only read as YAML")
    checked = subprocess.run(
        [*command, "-f", str(TOP / "examples" / "compose.yaml"), "config", "--quiet"],
        env={**os.environ, "LITELLM_MASTER_KEY": "sk-1"},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert checked.returncode == 0, checked.stderr


# Claude Code


def test_claude_code_s_settings_fit_the_proxy_s() -> None:
    config = load(CLAUDE_CODE / "config.yaml")
    (route,) = managed(config)
    settings = json.loads((CLAUDE_CODE / "settings.json").read_text(encoding="utf-8"))
    env = settings["env"]
    assert all(isinstance(value, str) for value in env.values())
    models = {name: value for name, value in env.items() if "MODEL" in name}
    assert len(models) == 5
    assert set(models.values()) == {route}
    assert env["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:4000"  # without /v1, which Claude Code adds
    assert env["CLAUDE_CODE_ATTRIBUTION_HEADER"] == "0"
    assert settings["includeGitInstructions"] is False
    told = (CLAUDE_CODE / "README.md").read_text(encoding="utf-8")
    assert env["ANTHROPIC_AUTH_TOKEN"] in told


def test_the_rules_in_the_texts_are_valid() -> None:
    (raw,) = managed(load(CLAUDE_CODE / "config.yaml")).values()
    assert [rule.name for rule in read_settings("claude", raw, {}).steady.all_rules] == ["claude_code", "git_status"]
    written = re.findall(
        r"(?:# +|`|\{)(rules: \[.*\])[`}\n]", "".join(path.read_text() for path in (README, *DOCS, CONFIG))
    )
    (block,) = re.findall(
        r"```yaml\nslot_cache:\n(.*?)```", doc_section("clients", "Prompts that hold still"), re.DOTALL
    )
    assert len(written) >= 6
    for text in (*written, block):
        found = yaml.safe_load(text)
        read_settings("rules", {"steady": found} if "rules" in found else found, {})


def test_the_ready_made_rules_are_told() -> None:
    rows = re.findall(r"(?m)^\| `(\w+)` \|[^|\n]*\| `(\w+)` \|$", doc_section("clients", "Prompts that hold still"))
    assert rows == [(name, rule.do) for name, rule in READY.items()]


# README and docs/


def section(title: str, path: Path = README) -> str:
    """The text of one section."""
    text = path.read_text(encoding="utf-8")
    match = re.search(rf"(?ms)^## {re.escape(title)}\n(.*?)(?=^## |\Z)", text)
    assert match, title
    return match[1]


def doc_section(name: str, title: str) -> str:
    return section(title, TOP / "docs" / f"{name}.md")


def option_rows() -> list[list[str]]:
    rows = [line.strip().strip("|").split(" | ") for line in section("Options").splitlines() if line.startswith("| `")]
    return [[cell.strip().replace("`", "") for cell in row] for row in rows]


def test_the_table_of_options_is_that_of_the_code() -> None:
    rows = option_rows()
    assert all(len(row) == 4 for row in rows)
    assert sorted(row[0] for row in rows) == sorted(Settings.model_fields)
    for option, variable, told, meaning in rows:
        assert variable == ENVIRONMENT.get(option, "-"), option
        assert told.lower() == given_default(option).lower(), option
        assert meaning.endswith("."), option


def commands() -> Iterator[str]:
    actions = _parser()._actions
    choices = next(action.choices for action in actions if isinstance(action.choices, dict))
    yield from choices


@pytest.mark.parametrize(
    ("path", "title"),
    [(README, "Commands"), (TOP / "docs" / "commands.md", "The command line")],
    ids=["README", "docs"],
)
def test_every_command_is_told(path: Path, title: str) -> None:
    text = section(title, path)
    for command in commands():
        assert f"slot-cache {command}" in text, command
    assert not set(re.findall(r"slot-cache ([a-z]+)", text)) - set(commands())


def test_every_outcome_is_told() -> None:
    rows = re.findall(r"(?m)^\| `(\w+)` \|", doc_section("seeing", "Outcomes"))
    assert sorted(rows) == sorted(outcome.value for outcome in Outcome)
    text = section("Install and use")
    for outcome in Outcome:
        assert f"`{outcome.value}`" in text, outcome


def test_the_changelog_knows_this_version() -> None:
    assert f"## [{__version__}]" in (TOP / "CHANGELOG.md").read_text(encoding="utf-8")


def anchors(text: str) -> set[str]:
    """The anchors of the headings, as they are made of their words."""
    headings = re.findall(r"(?m)^#+ (.+)$", text)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", MARKDOWN, ids=relative)
def test_links_lead_somewhere(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (path.parent / name).resolve() if name else path
        assert file.exists(), target
        assert file.is_relative_to(TOP), target
        if anchor:
            assert anchor in anchors(file.read_text(encoding="utf-8")), target


@pytest.mark.parametrize("path", TEXTS, ids=relative)
def test_no_path_of_the_machine_it_was_written_on(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for place in ("/root", "/home/", "/Users/", "/work/", "/tmp/", "site-packages"):
        assert place not in text, place


@pytest.mark.parametrize("path", TEXTS, ids=relative)
def test_plain_text(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.endswith("\n") and not text.endswith("\n\n")
    assert not re.search(r"[ \t]+$", text, re.MULTILINE)
    if path == CHINESE:
        text = re.sub(r"[\u3000-\u303f\u3400-\u9fff\uff00-\uffef]", "", text)  # Chinese, and its punctuation
    elif path == README:
        text = text.replace("[中文](README.zh-CN.md)", "")
    unusual = {char for char in text if ord(char) > 0x2FFF or 0x2600 <= ord(char) <= 0x27BF}
    assert not unusual, unusual


# services


UNITS = sorted((TOP / "examples" / "systemd").glob("*.service"))


@pytest.mark.parametrize("path", UNITS, ids=relative)
def test_systemd_takes_the_units(path: Path, tmp_path: Path) -> None:
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("systemd-analyze is not installed")
    for unit in UNITS:  # they name each other, and programs that are not here
        (tmp_path / unit.name).write_text(re.sub(r"(?m)^ExecStart=\S+", "ExecStart=/bin/true", unit.read_text()))
    checked = subprocess.run(
        [program, "verify", tmp_path / path.name], capture_output=True, text=True, timeout=60, check=False
    )
    assert (checked.returncode, checked.stderr) == (0, "")


def test_the_services_fit_together() -> None:
    server, proxy = (
        (TOP / "examples" / "systemd" / f"{name}.service").read_text() for name in ("llama-server", "litellm")
    )
    rotated = (TOP / "examples" / "logrotate.conf").read_text()
    log = re.search(r"(?m)^StandardOutput=append:(\S+)$", server)
    assert log
    assert Path(log[1]).match("/var/log/llama-server/*.log")
    assert "/var/log/llama-server/*.log {" in rotated
    assert re.search(r"(?m)^    copytruncate$", rotated)
    assert log[1] in doc_section("commands", "The monitor")
    assert "--slot-save-path /var/lib/slot-cache " in server
    assert re.search(r"(?m)^StateDirectory=.*\bslot-cache\b", server)
    assert re.search(r"(?m)^StateDirectory=.*\bslot-cache\b", proxy)
    assert re.findall(r"(?m)^(?:User|Group)=(\w+)$", server + proxy) == ["llama"] * 4


def test_the_monitors_settings_are_all_told() -> None:
    told = load(CONFIG)[monitor.SECTION]
    assert set(told) == {field.name for field in fields(monitor.Options)}
    arguments = _parser().parse_args(["monitor", "--config", str(CONFIG)])
    settings = monitor.settings_of(arguments, {"LITELLM_MASTER_KEY": "sk-x"})
    assert (settings.key, settings.server_key, settings.rate) == ("sk-x", None, 1.0)
