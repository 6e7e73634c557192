"""Settings from a file and from flags, and how wrong ones are refused."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from radixkv.config import EngineConfig, ServerConfig
from radixkv.errors import InvalidConfig
from radixkv.service.config import is_loopback, load_settings, setting_names


def write(folder: Path, text: str) -> Path:
    file = folder / "radixkv.toml"
    file.write_text(text)
    return file


def test_without_file_and_flags_the_defaults_hold() -> None:
    settings = load_settings(None, {"port": None, "model": None})
    assert settings.engine == EngineConfig()
    assert settings.server == ServerConfig()
    assert not settings.insecure_remote


def test_flags_win_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    file = write(tmp_path, 'kv_memory = "2GiB"\nport = 9000\nprefix-cache = false\n')
    settings = load_settings(file, {"port": 9001, "max_body": "1MiB"})
    assert settings.engine.kv_memory == 2 * 2**30
    assert settings.engine.prefix_cache is False
    assert settings.server.port == 9001
    assert settings.server.max_body == 2**20


def test_every_field_of_both_records_is_a_key() -> None:
    wanted = {f.name for f in fields(EngineConfig)} | {f.name for f in fields(ServerConfig)}
    assert wanted <= set(setting_names())


def test_an_unknown_key_is_refused_with_its_neighbour_and_the_accepted_ones(
    tmp_path: Path,
) -> None:
    with pytest.raises(InvalidConfig) as e:
        load_settings(write(tmp_path, "kv_memry = 5"), {})
    assert "unknown key 'kv_memry'; did you mean kv_memory?" in str(e.value)
    assert "block_size" in str(e.value)
    with pytest.raises(InvalidConfig, match="unknown key 'zzz'. Accepted keys: .*block_size"):
        load_settings(write(tmp_path, "zzz = 5"), {})


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("[engine]\nport = 1", "is a table"),
        ('port = "80"', "port is '80'; wanted a whole number"),
        ("port = true", "wanted a whole number"),
        ("port = 70000", "0 to 65535"),
        ("force_miss = 1", "wanted true or false"),
        ("model = 3", "wanted text"),
        ('dtype = "fp16"', "accepted: auto, bfloat16, float32"),
        ('kv_memory = "much"', "a size such as 512MiB"),
        (
            "kv_memory = 1.5",
            'kv_memory is 1.5; wanted a whole number of bytes or a size such as "5',
        ),
        ('device = "tpu"', "accepted: auto, cpu, cuda, cuda:INDEX"),
        ("deterministic = 1", "wanted true or false"),
        ('deterministic = true\ndecoder = "generic"', "deterministic needs the compiled decoder"),
        ("shutdown_timeout = -1", "0 to 3600 seconds"),
        ('public_prompts = "x"', "wanted a list of texts"),
        ("public_prompts = [1]", "holds something that is no text"),
        ('public_prompts = [""]', "holds something that is no text"),
        ("port = 1\nport = 2", "cannot be read"),
        ("kv_memory = 1\nkv-memory = 2", "given twice"),
    ],
)
def test_a_bad_value_is_refused_with_its_name_and_what_is_accepted(
    tmp_path: Path, line: str, words: str
) -> None:
    with pytest.raises(InvalidConfig) as e:
        load_settings(write(tmp_path, line), {})
    assert words in str(e.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="there is no such file"):
        load_settings(tmp_path / "no.toml", {})


def test_a_bad_flag_is_named_as_a_flag() -> None:
    with pytest.raises(InvalidConfig, match="--kv-memory is 'lots'"):
        load_settings(None, {"kv_memory": "lots"})


def test_a_remote_host_needs_a_word_of_its_own() -> None:
    """SECURITY-6"""
    assert ServerConfig().host == "127.0.0.1"
    for host in ("0.0.0.0", "::", "192.168.1.5", "my-machine"):
        with pytest.raises(InvalidConfig, match="--insecure-remote"):
            load_settings(None, {"host": host})
        assert load_settings(None, {"host": host, "insecure_remote": True}).server.host == host


def test_a_remote_host_needs_no_such_word_where_callers_have_keys() -> None:
    """SECURITY-6"""
    settings = load_settings(None, {"host": "0.0.0.0", "tenants": "tenants.toml"})
    assert (settings.server.host, settings.tenants) == ("0.0.0.0", "tenants.toml")
    assert not settings.insecure_remote and not settings.open_metrics


def test_a_list_of_texts_is_one_whether_it_comes_from_the_file_or_from_flags(
    tmp_path: Path,
) -> None:
    file = write(tmp_path, 'public_prompts = ["Be brief.", "Be kind."]\n')
    assert load_settings(file, {}).public_prompts == ("Be brief.", "Be kind.")
    assert load_settings(file, {"public_prompts": ["x"]}).public_prompts == ("x",)
    assert load_settings(None, {"public_prompts": None}).public_prompts == ()


def test_loopback_is_told_from_the_rest() -> None:
    assert all(map(is_loopback, ("localhost", "127.0.0.1", "127.8.8.8", "::1", "[::1]")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "localhost.evil.example")))


def test_the_example_names_every_key_and_gives_its_default() -> None:
    file = Path(__file__).parents[1] / "examples" / "radixkv.toml"
    assert load_settings(file, {}) == load_settings(None, {})
    shown = {line.strip("# ").split(" = ")[0] for line in file.read_text().splitlines()}
    assert set(setting_names()) <= shown


def test_vllms_metric_names_are_had_by_either_setting() -> None:
    assert not load_settings(None, {}).vllm_metrics
    assert load_settings(None, {"metrics_compat": "vllm"}).vllm_metrics
    assert load_settings(None, {"vllm_metric_names": True}).vllm_metrics
    with pytest.raises(InvalidConfig, match="metrics_compat is 'sglang'; wanted 'none' or 'vllm'"):
        load_settings(None, {"metrics_compat": "sglang"})
