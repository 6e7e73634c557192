"""/v1/files and /v1/batches as OpenAI's client meets them: lives, faults, restarts, owners."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import requests

from radixkv.errors import InvalidConfig
from radixkv.service.batch import jobs
from radixkv.service.batch.store import Store
from tests.batch_cases import chat, completion, three_levels
from tests.http_server import WAIT_S, RunningServer, running_server
from tests.tenant_files import open_gate


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running_server(batch_dir=tmp_path_factory.mktemp("batches")) as server:
        yield server


def upload(client: openai.OpenAI, lines: list[Any]) -> str:
    raw = "".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines)
    file = client.files.create(file=("in.jsonl", io.BytesIO(raw.encode())), purpose="batch")
    assert (file.object, file.bytes, file.purpose) == ("file", len(raw), "batch")
    assert client.files.content(file.id).text == raw
    return file.id


def begin(client: openai.OpenAI, lines: list[Any], url: str = "/v1/completions") -> Any:
    return client.batches.create(
        input_file_id=upload(client, lines),
        endpoint=url,  # type: ignore[arg-type]
        completion_window="24h",
        metadata={"for": "tests"},
    )


def wait(client: openai.OpenAI, batch: Any, *ends: str) -> Any:
    deadline = time.monotonic() + WAIT_S
    while batch.status not in (ends or ("completed",)):
        assert batch.status in ("validating", "in_progress", "cancelling"), batch
        assert time.monotonic() < deadline, batch
        time.sleep(0.02)
        batch = client.batches.retrieve(batch.id)
    return batch


def wait_for_answers(client: openai.OpenAI, batch: Any, least: int) -> None:
    deadline = time.monotonic() + WAIT_S
    while batch.request_counts.completed < least:
        assert batch.status in ("validating", "in_progress") and time.monotonic() < deadline
        time.sleep(0.02)
        batch = client.batches.retrieve(batch.id)


def lines_of(client: openai.OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    assert file_id is not None
    return [json.loads(line) for line in client.files.content(file_id).text.splitlines()]


def expect_sums(batch: Any, answers: list[dict[str, Any]]) -> None:
    """Check the batch's usage against that of its answers."""
    of = [answer["response"]["body"]["usage"] for answer in answers]
    usage = batch.usage
    assert usage.input_tokens == sum(u["prompt_tokens"] for u in of) > 0
    assert usage.output_tokens == sum(u["completion_tokens"] for u in of) > 0
    cached = sum(u["prompt_tokens_details"]["cached_tokens"] for u in of)
    assert usage.input_tokens_details.cached_tokens == cached
    assert usage.output_tokens_details.reasoning_tokens == 0
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens


def test_a_batch_from_upload_to_download(server: RunningServer) -> None:
    """BATCH-1: the official client uploads, creates, polls and downloads; counts are right."""
    client = server.client()
    asked = [chat(f"c{i}", "You are brief.", f"Question {i}?") for i in range(12)]
    batch = begin(client, asked, "/v1/chat/completions")
    assert (batch.object, batch.endpoint) == ("batch", "/v1/chat/completions")
    assert batch.usage is None
    done = wait(client, batch)
    assert done.metadata == {"for": "tests"}
    assert done.error_file_id is None and done.errors is None
    counts = done.request_counts
    assert (counts.total, counts.completed, counts.failed) == (12, 12, 0)
    assert done.created_at <= done.in_progress_at <= done.finalizing_at <= done.completed_at
    answers = {line["custom_id"]: line for line in lines_of(client, done.output_file_id)}
    assert sorted(answers) == sorted(line["custom_id"] for line in asked)
    expect_sums(done, list(answers.values()))
    for line in asked:
        response = answers[line["custom_id"]]["response"]
        assert (response["status_code"], answers[line["custom_id"]]["error"]) == (200, None)
        direct = client.chat.completions.create(model="tiny", **_openai(line["body"]))
        assert response["body"]["choices"][0]["message"]["content"] == (
            direct.choices[0].message.content
        )
    assert done.id in [b.id for b in client.batches.list(limit=2)]
    assert done.output_file_id in [f.id for f in client.files.list()]
    assert client.files.delete(done.output_file_id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.content(done.output_file_id)


def _openai(body: dict[str, Any]) -> dict[str, Any]:
    body = dict(body)
    return {"extra_body": {"ignore_eos": body.pop("ignore_eos")}} | body


def test_a_bad_line_is_only_in_the_error_file(server: RunningServer) -> None:
    """BATCH-2: per-line errors; the rest of the batch completes."""
    client = server.client()
    lines = [
        completion("good", "one"),
        completion("bad", "two", temperature=9),
        "no json",
        chat("elsewhere", "three"),
    ]
    done = wait(client, begin(client, lines))
    counts = done.request_counts
    assert (counts.total, counts.completed, counts.failed) == (4, 1, 3)
    assert [a["custom_id"] for a in lines_of(client, done.output_file_id)] == ["good"]
    errors = {e["custom_id"]: e for e in lines_of(client, done.error_file_id)}
    assert set(errors) == {"bad", None, "elsewhere"}
    assert errors["bad"]["response"]["body"]["error"]["param"] == "temperature"
    assert errors[None]["error"]["line"] == 3
    assert errors["elsewhere"]["error"]["code"] == "mismatched_url"


def test_a_cancelled_batch_keeps_what_was_answered(server: RunningServer) -> None:
    """BATCH-2: cancelled keeps finished lines."""
    client = server.client()
    lines = [completion(f"l{i}", f"number {i}", max_tokens=200) for i in range(200)]
    batch = begin(client, lines)
    wait_for_answers(client, batch, 4)
    assert client.batches.cancel(batch.id).status in ("cancelling", "cancelled")
    done = wait(client, batch, "cancelled")
    answers = lines_of(client, done.output_file_id)
    counts = done.request_counts
    assert 3 < len(answers) == counts.completed < counts.total == 200
    assert done.cancelling_at <= done.cancelled_at
    assert client.batches.cancel(batch.id).status == "cancelled"
    server.wait_until(server.at_rest)


def test_a_file_that_is_no_batch_fails_as_a_whole(server: RunningServer) -> None:
    client = server.client()
    batch = wait(client, begin(client, ["", " "]), "failed")
    assert batch.errors.data[0].code == "invalid_input_file"
    assert batch.output_file_id is None


def test_many_lines_of_few_prefixes_compute_each_prefix_once(tmp_path: Path) -> None:
    """BATCH-3: shuffled lines of ten prefixes; computed prompt tokens are the unique ones."""
    lines, prompts = three_levels(150, tops=5, middles=2, max_tokens=2)
    unique = len({tuple(p[: i + 1]) for p in prompts for i in range(len(p))})
    with running_server(batch_dir=tmp_path) as server:
        client = server.client()
        done = wait(client, begin(client, lines))
        answers = lines_of(client, done.output_file_id)
        computed = sum(
            a["response"]["body"]["usage"]["prompt_tokens"]
            - a["response"]["body"]["usage"]["prompt_tokens_details"]["cached_tokens"]
            for a in answers
        )
        assert server.engine.stats().prompt_tokens_computed_total == computed == unique


def test_a_server_that_ends_in_the_middle_goes_on_where_it_was(tmp_path: Path) -> None:
    """BATCH-2: restart recovery; each line exactly once, in a batch that waits too."""
    lines = [completion(f"l{i}", f"number {i}", max_tokens=60) for i in range(120)]
    with running_server(batch_dir=tmp_path, max_num_seqs=4) as server:
        client = server.client()
        first, second = begin(client, lines), begin(client, lines[:3])
        wait_for_answers(client, first, 4)
    with running_server(batch_dir=tmp_path) as server:
        client = server.client()
        done = wait(client, first)
        answers = lines_of(client, done.output_file_id)
        assert sorted(a["custom_id"] for a in answers) == sorted(x["custom_id"] for x in lines)
        assert done.request_counts.completed == 120
        expect_sums(done, answers)
        assert wait(client, second).request_counts.completed == 3


def test_a_batch_whose_window_is_over_is_expired_and_keeps_its_answers(tmp_path: Path) -> None:
    """BATCH-2: expired, honestly."""
    lines = [completion(f"l{i}", f"number {i}", max_tokens=60) for i in range(120)]
    with running_server(batch_dir=tmp_path, max_num_seqs=4) as server:
        client = server.client()
        batch = begin(client, lines)
        wait_for_answers(client, batch, 4)
    store = Store(tmp_path)
    (stored,) = store.unfinished()
    stored.doc["expires_at"] = int(time.time()) - 1
    store.update(stored)
    store.close()
    with running_server(batch_dir=tmp_path) as server:
        client = server.client()
        done = wait(client, batch, "expired")
        assert 3 < len(lines_of(client, done.output_file_id)) < 120


def test_tenants_see_nothing_of_each_others_files_and_batches(tmp_path: Path) -> None:
    gate, keys = open_gate(tmp_path, one={}, two={})
    with running_server(batch_dir=tmp_path / "b", gate=gate) as server:
        one, two = server.client(keys["one"]), server.client(keys["two"])
        batch = wait(one, begin(one, [completion("a", "secret")]))
        assert not list(two.files.list()) and not list(two.batches.list())
        for ask in (
            lambda: two.files.content(batch.output_file_id),
            lambda: two.files.delete(batch.input_file_id),
            lambda: two.files.retrieve(batch.input_file_id),
            lambda: two.batches.retrieve(batch.id),
            lambda: two.batches.cancel(batch.id),
            lambda: two.batches.create(
                input_file_id=batch.input_file_id,
                endpoint="/v1/completions",
                completion_window="24h",
            ),
        ):
            with pytest.raises(openai.NotFoundError):
                ask()
        assert server.engine.stats().by_tenant["one"].requests_total == 1


def test_limits_and_bad_uploads_are_refused(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = server.client()
    with pytest.raises(openai.BadRequestError, match="purpose"):
        client.files.create(file=("a", b"x"), purpose="fine-tune")
    status, _, reply = server.ask("POST", "/v1/files", {"purpose": "batch"})
    assert status == 415 and "multipart" in reply["error"]["message"]
    for name in ("\x0b", "\x00", "a\x7f"):  # what no header may hold
        form = f'--b\r\nContent-Disposition: form-data; name="{name}"\r\n\r\nx\r\n--b--\r\n'
        answer = requests.post(
            f"{server.url}/v1/files",
            data=form.encode(),
            headers={"Content-Type": "multipart/form-data; boundary=b"},
            timeout=WAIT_S,
        )
        assert answer.status_code == 400, answer.text
    monkeypatch.setattr("radixkv.service.http.files.MAX_FILE_BYTES", 100)
    with pytest.raises(openai.APIStatusError) as refused:
        client.files.create(file=("a", b"x" * 101), purpose="batch")
    assert refused.value.status_code == 413
    monkeypatch.setattr("radixkv.service.http.files.MAX_TENANT_BYTES", 1)
    with pytest.raises(openai.APIStatusError, match="delete some"):
        client.files.create(file=("a", b"x" * 50), purpose="batch")
    monkeypatch.undo()
    monkeypatch.setattr(jobs, "MAX_LINES", 2)
    batch = wait(client, begin(client, [completion(str(i), "x") for i in range(3)]), "failed")
    assert "3 lines" in batch.errors.data[0].message
    with pytest.raises(openai.BadRequestError, match="endpoint"):
        begin(client, [completion("a", "x")], "/v1/embeddings")


def test_a_server_without_a_directory_says_how_to_have_batches() -> None:
    with running_server() as server:
        for method, path in (("GET", "/v1/files"), ("GET", "/v1/batches"), ("POST", "/v1/files")):
            status, _, reply = server.ask(method, path)
            assert (status, reply["error"]["code"]) == (404, "batches_off")
            assert "--batch-dir" in reply["error"]["message"]


def test_two_servers_do_not_share_a_directory(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with pytest.raises(InvalidConfig, match="another server"):
        Store(tmp_path)
    store.close()
    Store(tmp_path).close()
