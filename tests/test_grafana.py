"""The dashboard and the rules name only metrics that a server exports."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from tests.http_server import RunningServer, running_server

FOLDER = Path(__file__).parents[1] / "examples" / "grafana"
NAME = re.compile(r"\bradixkv:[a-z0-9_]+")


@pytest.fixture(scope="module")
def exported() -> Iterator[set[str]]:
    """Names of the samples of a server that has answered something."""
    with running_server() as server:
        server.ask("POST", "/v1/completions", {"prompt": "hello you", "max_tokens": 3})
        names = _names(server)
        # Those of tenants are there only where there are keys; their names are of one place.
        from prometheus_client import CollectorRegistry
        from prometheus_client.exposition import generate_latest

        from radixkv.service.engine_metrics import PREFIX
        from radixkv.service.tenant_metrics import TenantCounters

        registry = CollectorRegistry()
        TenantCounters(registry, PREFIX)
        text = generate_latest(registry).decode()
        names |= {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
        yield names


def _names(server: RunningServer) -> set[str]:
    text: str = server.ask("GET", "/metrics")[2]
    return {re.split(r"[{ ]", line)[0] for line in text.splitlines() if not line.startswith("#")}


def expressions(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        for key, value in node.items():
            if key in ("expr", "query") and isinstance(value, str):
                yield value
            else:
                yield from expressions(value)
    elif isinstance(node, list):
        for value in node:
            yield from expressions(value)


def test_every_metric_of_the_dashboard_is_exported(exported: set[str]) -> None:
    dashboard = json.loads((FOLDER / "radixkv.json").read_text())
    found = {name for text in expressions(dashboard) for name in NAME.findall(text)}
    assert len(found) > 20
    assert found <= exported, found - exported


def test_panels_do_not_overlap_and_each_asks_something() -> None:
    panels = json.loads((FOLDER / "radixkv.json").read_text())["panels"]
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        assert panel["title"] and panel["targets"]
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken and at["x"] + at["w"] <= 24, panel["title"]
        taken |= cells
    assert len({panel["id"] for panel in panels}) == len(panels)


def test_every_metric_of_the_rules_is_exported_or_recorded_by_them(exported: set[str]) -> None:
    groups = yaml.safe_load((FOLDER / "rules.yml").read_text())["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    recorded = {rule["record"] for rule in rules if "record" in rule}
    for rule in rules:
        names = set(NAME.findall(rule["expr"]))
        own = set(re.findall(r"\b(?:model_name|tenant):radixkv_[a-z0-9_:]+", rule["expr"]))
        assert names or own, rule
        assert names <= exported, names - exported
        assert own <= recorded, own - recorded
        if "alert" in rule:
            assert rule["labels"]["severity"] in ("warning", "critical")
            assert rule["annotations"]["summary"]


def test_parentheses_and_quotes_are_closed() -> None:
    groups = yaml.safe_load((FOLDER / "rules.yml").read_text())["groups"]
    dashboard = json.loads((FOLDER / "radixkv.json").read_text())
    for text in [*expressions(groups), *expressions(dashboard)]:
        for left, right in ("()", "{}", "[]"):
            assert text.count(left) == text.count(right), text
        assert text.count('"') % 2 == 0, text
