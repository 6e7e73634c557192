"""What Prometheus reads: names, invariants, and that a scrape waits for nobody."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.http_server import RunningServer, running_server

KINDS = ("recompute", "swap")
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server() as server:
        yield server


def scrape(server: RunningServer) -> Samples:
    status, headers, text = server.ask("GET", "/metrics")
    assert status == 200
    assert headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[f"radixkv:{name}", tuple(sorted(({"model_name": "tiny"} | labels).items()))]


def complete(server: RunningServer, prompt: object, **fields: object) -> dict[str, int]:
    reply = server.ask("POST", "/v1/completions", {"prompt": prompt, "max_tokens": 2} | fields)[2]
    usage: dict[str, int] = reply["usage"]
    return usage | {"cached_tokens": reply["usage"]["prompt_tokens_details"]["cached_tokens"]}


NAMES = (
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "prompt_tokens_total",
    "prompt_tokens_cached_total",
    "prompt_tokens_computed_total",
    "recomputed_tokens_total",
    "generation_tokens_total",
    "num_preemptions_total",
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "evicted_blocks_total",
    "time_to_first_token_seconds_bucket",
    "inter_token_latency_seconds_bucket",
    "e2e_request_latency_seconds_bucket",
    "request_queue_time_seconds_bucket",
    "request_prefill_time_seconds_bucket",
    "request_decode_time_seconds_bucket",
    "request_prompt_tokens_bucket",
    "request_generation_tokens_bucket",
    "request_success_total",
    "cache_config_info",
    "kv_blocks",
    "preemptions_by_kind_total",
    "swapped_tokens_total",
    "swapped_bytes_total",
    "swap_used_bytes",
    "swap_capacity_bytes",
)


def test_the_names_that_people_scrape_are_there_with_the_models_label(
    server: RunningServer,
) -> None:
    samples = scrape(server)
    for name in NAMES:
        found = [labels for (full, labels) in samples if full == f"radixkv:{name}"]
        assert found, name
        assert all(dict(labels)["model_name"] == "tiny" for labels in found)
    assert not any(name.endswith("_created") for name, _ in samples)
    (info,) = [dict(labels) for (name, labels) in samples if name == "radixkv:cache_config_info"]
    assert info["block_size"] == "16"
    assert info["num_gpu_blocks"] == str(server.engine.stats().num_blocks)


def test_vllms_names_show_the_same_values_where_they_are_wanted(server: RunningServer) -> None:
    complete(server, "the user is in the system")
    samples = scrape(server)
    twins = [key for key in samples if key[0].startswith("vllm:")]
    assert {"vllm:prefix_cache_hits_total", "vllm:num_requests_waiting"} <= {n for n, _ in twins}
    for name, labels in twins:
        assert samples[name, labels] == samples["radixkv:" + name.removeprefix("vllm:"), labels]
    with running_server() as plain:
        plain.serving.metrics._shown._vllm_names = False
        assert not any(name.startswith("vllm:") for name, _ in scrape(plain))


def test_steps_are_counted_by_the_tokens_that_went_through_the_model(
    server: RunningServer,
) -> None:
    server.ask("POST", "/v1/cache/reset")
    before = scrape(server)
    complete(server, [40 + i for i in range(50)], max_tokens=3, ignore_eos=True)
    server.wait_until(server.at_rest)
    after = scrape(server)

    def grown(name: str, **labels: str) -> float:
        return value(after, name, **labels) - value(before, name, **labels)

    # A step over the prompt, and one more for each of two tokens that it goes on from.
    assert grown("iteration_tokens_total_sum") == 50 + 2
    assert grown("iteration_tokens_total_count") == grown("engine_steps_total") == 3
    assert grown("iteration_tokens_total_bucket", le="1.0") == 2
    assert grown("iteration_tokens_total_bucket", le="32.0") == 2
    assert grown("iteration_tokens_total_bucket", le="64.0") == 3
    assert value(after, "iteration_tokens_total_bucket", le="+Inf") == value(
        after, "iteration_tokens_total_count"
    )
    assert "vllm:iteration_tokens_total_bucket" in {name for name, _ in after}


def test_counters_keep_their_values_while_nothing_happens(server: RunningServer) -> None:
    """METRICS-1: hits and queries are two counters in tokens, not a rate that falls to 0."""
    before = scrape(server)
    usages = [complete(server, "hello you and the user is in " * 5) for _ in range(20)]
    server.wait_until(server.at_rest)
    first, second = scrape(server), scrape(server)
    for name, total in (
        ("prefix_cache_queries_total", sum(u["prompt_tokens"] for u in usages)),
        ("prefix_cache_hits_total", sum(u["cached_tokens"] for u in usages)),
        ("prompt_tokens_total", sum(u["prompt_tokens"] for u in usages)),
        ("prompt_tokens_cached_total", sum(u["cached_tokens"] for u in usages)),
        ("generation_tokens_total", sum(u["completion_tokens"] for u in usages)),
    ):
        assert value(first, name) - value(before, name) == total > 0, name
        assert value(second, name) == value(first, name)
    computed = value(first, "prompt_tokens_computed_total")
    assert computed + value(first, "prompt_tokens_cached_total") == value(
        first, "prompt_tokens_total"
    )


def test_hits_inside_a_block_are_counted_apart(server: RunningServer) -> None:
    """METRICS-4: a shared beginning of less than a block is reused, and shows."""
    server.ask("POST", "/v1/cache/reset")
    complete(server, [30 + i for i in range(12)])
    before = scrape(server)
    usage = complete(server, [30 + i for i in range(10)] + [9, 9])
    server.wait_until(server.at_rest)
    after = scrape(server)
    assert usage["cached_tokens"] == 10
    name = "prefix_cache_partial_hits_total"
    assert value(after, name) - value(before, name) == 10


def crowd(server: RunningServer) -> tuple[list[Samples], list[dict[str, int]]]:
    """Ask with eight prompts at once that have nothing in common, and scrape all the while."""
    prompts = [[3 + (i * 37 + j * 11) % 300 for j in range(40)] for i in range(8)]
    seen = [scrape(server)]
    usages: list[dict[str, int]] = []

    def run(prompt: list[int]) -> None:
        usages.append(complete(server, prompt, max_tokens=40, ignore_eos=True))

    threads = [threading.Thread(target=run, args=(prompt,)) for prompt in prompts]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        seen.append(scrape(server))
        server.run(asyncio.sleep(0.02))
    server.wait_until(server.at_rest)
    seen.append(scrape(server))
    return seen, usages


def test_preemption_is_counted_apart_and_no_counter_ever_falls() -> None:
    """METRICS-2, METRICS-3: random prompts in a pool that is too small, scraped all the while."""
    with running_server(
        kv_memory="80KiB", lookahead_tokens=0, max_num_seqs=4, swap_memory=0
    ) as server:
        seen, usages = crowd(server)
        for before, after in zip(seen, seen[1:], strict=False):
            for key, was in before.items():
                if key[0].endswith(("_total", "_bucket", "_count", "_sum")):
                    assert after[key] >= was, key
        last = seen[-1]
        assert len(usages) == 8
        assert value(last, "num_preemptions_total") > 0
        assert value(last, "recomputed_tokens_total") > 0
        assert value(last, "prefix_cache_hits_total") == 0, "the prompts have nothing in common"
        assert {u["cached_tokens"] for u in usages} == {0}
        assert all(u["cached_tokens"] <= u["prompt_tokens"] for u in usages)
        assert value(last, "prefix_cache_queries_total") == 8 * 40
        assert value(last, "invariant_violations_total") == 0


def test_preemptions_are_told_by_kind_and_what_is_swapped_by_direction() -> None:
    """Host memory is taken up to its capacity, and none is when all is over."""
    with running_server(
        kv_memory="80KiB", lookahead_tokens=0, max_num_seqs=4, swap_memory="1MiB"
    ) as server:
        seen, _ = crowd(server)
    last = seen[-1]
    kinds = {kind: value(last, "preemptions_by_kind_total", kind=kind) for kind in KINDS}
    assert sum(kinds.values()) == value(last, "num_preemptions_total")
    assert kinds["swap"] > 0, "it is not known yet that computing is cheaper"
    for name in ("swapped_tokens_total", "swapped_bytes_total"):
        out, back = (value(last, name, direction=direction) for direction in ("out", "in"))
        assert out >= back >= 0 and out > 0, name
    assert {value(samples, "swap_capacity_bytes") for samples in seen} == {2**20}
    assert all(0 <= value(samples, "swap_used_bytes") <= 2**20 for samples in seen)
    assert value(last, "swap_used_bytes") == 0
    assert value(last, "invariant_violations_total") == 0


def test_times_are_observed_once_a_request_and_answers_by_route(server: RunningServer) -> None:
    before = scrape(server)
    complete(server, ["the", "user"], ignore_eos=True, max_tokens=4)
    body = {"prompt": "the", "max_tokens": 4, "ignore_eos": True}
    server.events("/v1/completions", body)
    server.ask("POST", "/v1/completions", {"prompt": 5})
    after = scrape(server)

    def grown(name: str) -> float:
        return value(after, name) - value(before, name)

    for name in (
        "time_to_first_token_seconds_count",
        "e2e_request_latency_seconds_count",
        "request_queue_time_seconds_count",
        "request_prefill_time_seconds_count",
        "request_decode_time_seconds_count",
        "request_time_per_output_token_seconds_count",
    ):
        assert grown(name) == 3, name
    assert grown("request_generation_tokens_sum") == 12
    assert 1 <= grown("inter_token_latency_seconds_count") <= 3
    answers = {
        dict(labels)["status"]: number
        for (name, labels), number in after.items()
        if name == "radixkv:http_responses_total" and dict(labels)["route"] == "/v1/completions"
    }
    assert answers["400"] >= 1 and answers["200"] >= 2


def test_prompt_tokens_are_told_by_where_they_came_from(server: RunningServer) -> None:
    """Under vLLM's names too, and in its sense: each prompt token is counted once."""
    before = scrape(server)
    usages = [complete(server, "where do these tokens come from " * 4) for _ in range(3)]
    server.wait_until(server.at_rest)
    after = scrape(server)

    def gained(source: str) -> float:
        key = "vllm:prompt_tokens_by_source_total", (("model_name", "tiny"), ("source", source))
        return after[key] - before[key]

    cached = sum(usage["cached_tokens"] for usage in usages)
    assert gained("local_cache_hit") == cached > 0
    assert gained("local_compute") == sum(u["prompt_tokens"] for u in usages) - cached


def test_residency_is_shown_as_histograms_in_vllms_form(server: RunningServer) -> None:
    with running_server(kv_memory="96KiB", max_model_len=160) as small:
        for i in range(40):
            complete(small, [3 + i] * 60)
            complete(small, [3 + i] * 60)
        small.wait_until(small.at_rest)
        samples = scrape(small)
        for name in ("lifetime", "idle_before_evict", "reuse_gap"):
            metric = f"vllm:kv_block_{name}_seconds"
            buckets = [
                (float(dict(labels)["le"]), n)
                for (full, labels), n in samples.items()
                if full == f"{metric}_bucket"
            ]
            counts = [n for _, n in sorted(buckets)]
            assert counts == sorted(counts) and len(counts) > 5
            assert counts[-1] == samples[f"{metric}_count", (("model_name", "tiny"),)]
        idle = samples["vllm:kv_block_idle_before_evict_seconds_count", (("model_name", "tiny"),)]
        assert idle > 0, "what went was looked at"
