"""Fingerprints: of contents, whatever they are called and wherever they lie."""

from __future__ import annotations

from pathlib import Path

from radixkv.identity import fingerprint as fp


def test_a_file_is_what_is_in_it(tmp_path: Path) -> None:
    """IDENTITY-2: a name says nothing."""
    (tmp_path / "a").write_bytes(b"weights")
    (tmp_path / "b").write_bytes(b"weights")
    (tmp_path / "c").write_bytes(b"weightz")
    assert fp.digest_file(tmp_path / "a") == fp.digest_file(str(tmp_path / "b"))
    assert fp.digest_file(tmp_path / "a") == fp.digest_bytes(b"weights")
    assert fp.digest_file(tmp_path / "a") != fp.digest_file(tmp_path / "c")
    assert len(fp.digest_bytes(b"")) == 32


def test_a_set_of_files_has_no_order_and_no_names(tmp_path: Path) -> None:
    (tmp_path / "1").write_bytes(b"x")
    (tmp_path / "2").write_bytes(b"y")
    (tmp_path / "3").write_bytes(b"x")
    both = fp.digest_files([tmp_path / "1", tmp_path / "2"])
    assert both == fp.digest_files([tmp_path / "2", tmp_path / "3"])
    assert both != fp.digest_files([tmp_path / "1", tmp_path / "3"])
    assert both != fp.digest_files([tmp_path / "1"])


def test_a_config_is_what_it_computes_not_where_it_came_from() -> None:
    a = {"hidden_size": 8, "rope_theta": 1e4, "_name_or_path": "/a", "transformers_version": "1"}
    b = {"_name_or_path": "/b", "rope_theta": 1e4, "hidden_size": 8}
    assert fp.digest_config(a) == fp.digest_config(b)
    assert fp.digest_config(a) != fp.digest_config({**b, "rope_theta": 1e5})


def test_the_layout_of_json_does_not_matter_and_white_space_in_a_template_does() -> None:
    assert fp.digest_json('{"a": [1, 2], "b": null}') == fp.digest_json('{"b":null,"a":[1,2]}')
    assert fp.digest_json('{"a": 1}') != fp.digest_json('{"a": 1.0}')
    assert fp.digest_text("{{ x }}") != fp.digest_text("{{ x }} ")


def test_the_parts_of_a_model_do_not_run_together() -> None:
    base = fp.model_digest("Llama", "c", "w", "r")
    assert base == fp.model_digest("Llama", "c", "w", "r")
    others = [
        fp.model_digest("Llam", "ac", "w", "r"),
        fp.model_digest("Llama", "w", "c", "r"),
        fp.model_digest("Llama", "c", "w", None),
        fp.model_digest("Llama", "c", "w", ""),
    ]
    assert len({base, *others}) == 5
    assert fp.combine("a", "b") != fp.combine("ab") != fp.combine("a", None)


def test_an_adapter_is_its_weights_and_its_scale() -> None:
    """IDENTITY-1, IDENTITY-2: neither alone, and never its name."""
    assert fp.adapter_digest("w", 1) == fp.adapter_digest("w", 1.0)
    assert fp.adapter_digest("w", 1.0) != fp.adapter_digest("w", 0.5)
    assert fp.adapter_digest("w", 1.0) != fp.adapter_digest("v", 1.0)
