"""``radixkv tenants`` as a person and as a script meet it."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from radixkv.service.cli import app
from radixkv.service.tenants import read_tenants


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> CliRunner:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.chdir(tmp_path)
    return CliRunner()


def run(cli: CliRunner, *args: str, code: int = 0) -> Result:
    result = cli.invoke(app, ["tenants", *args])
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return result


def key_of(result: Result) -> str:
    return result.stdout.splitlines()[-1]


def test_add_and_rotate_print_the_key_as_the_last_line(cli: CliRunner) -> None:
    first = key_of(run(cli, "add", "acme", "--weight", "2", "--cache-quota", "25%"))
    second = key_of(run(cli, "rotate", "acme"))
    assert first != second
    roster, now = read_tenants(Path("tenants.toml")), datetime.now(UTC)
    assert roster.find(first, now) == roster.find(second, now) == roster["acme"]
    assert (roster["acme"].weight, str(roster["acme"].cache_quota)) == (2.0, "25%")
    third = key_of(run(cli, "rotate", "acme", "--overlap", "0"))
    roster = read_tenants(Path("tenants.toml"))
    assert roster.find(first, now) is None and roster.find(third, now) is not None


def test_every_limit_has_a_flag(cli: CliRunner) -> None:
    run(
        cli,
        *("add", "acme", "--role", "admin", "--cache-floor", "100", "--cache-quota", "1GiB"),
        *("--requests-per-minute", "60", "--tokens-per-minute", "1000"),
        *("--max-concurrent", "4", "--max-queued", "8", "--file", "other.toml"),
    )
    (tenant,) = read_tenants(Path("other.toml")).values()
    assert tenant.role == "admin" and str(tenant.cache_floor) == "100 blocks"
    assert (tenant.requests_per_minute, tenant.tokens_per_minute) == (60, 1000)
    assert (tenant.max_concurrent, tenant.max_queued) == (4, 8)


def test_list_shows_ids_and_limits_but_no_hash_and_no_key(cli: CliRunner) -> None:
    key = key_of(run(cli, "add", "acme", "--max-concurrent", "4"))
    run(cli, "rotate", "acme", "--overlap", "30m")
    text = run(cli, "list").stdout
    assert "acme" in text and key[:11] in text and "max_concurrent 4" in text and "ends" in text
    (shown,) = json.loads(run(cli, "list", "--json").stdout)
    assert shown["name"] == "acme" and [k["id"] for k in shown["keys"]][0] == key[:11]
    assert shown["keys"][0]["expires"] and not shown["keys"][1]["expires"]
    for output in (text, json.dumps(shown)):
        assert key not in output and "sha256" not in output


def test_remove_takes_a_key_or_the_whole_tenant(cli: CliRunner) -> None:
    key = key_of(run(cli, "add", "acme"))
    run(cli, "remove", "acme", "--key", key[:11])
    assert read_tenants(Path("tenants.toml")).find(key, datetime.now(UTC)) is None
    run(cli, "remove", "acme")
    assert len(read_tenants(Path("tenants.toml"))) == 0


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("add", "Acme"), "the name 'Acme' is not accepted"),
        (("add", "local"), "is reserved"),
        (("add", "acme", "--role", "king"), "accepted: user, admin"),
        (("add", "acme", "--cache-quota", "much"), "wanted a number of blocks"),
        (("rotate", "acme"), "there is no such file"),
        (("rotate", "acme", "--overlap", "soon"), "wanted a time such as 30m"),
        (("remove", "acme"), "there is no such file"),
        (("list",), "there is no such file"),
    ],
)
def test_what_is_wrong_is_said_in_a_line_and_ends_with_2(
    cli: CliRunner, args: tuple[str, ...], words: str
) -> None:
    assert words in run(cli, *args, code=2).stderr
    assert not Path("tenants.toml").exists()


def test_serve_says_what_is_wrong_with_the_file_before_anything_is_loaded(cli: CliRunner) -> None:
    for text, words in (
        (None, "radixkv tenants add NAME"),
        ("[tenants.a]\n", "no key that opens anything"),
        ("[tenants.a]\nwieght = 1\n", "did you mean weight?"),
    ):
        if text is not None:
            Path("tenants.toml").write_text(text)
        result = cli.invoke(app, ["serve", "--tenants", "tenants.toml", "--port", "0"])
        assert result.exit_code == 2 and words in result.output


def test_giving_keys_loads_no_torch() -> None:
    code = "import sys, radixkv.service.tenants_edit; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
