"""Keys: random, shown once, kept as salted hashes, and compared with all whoever asks."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from radixkv.service.keys import KeyHash, Keyring

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def test_a_key_says_what_it_is_and_has_256_random_bits() -> None:
    made = [KeyHash.new(NOW) for _ in range(50)]
    assert len({key for key, _ in made}) == 50
    for key, kept in made:
        assert key.startswith(kept.id + "-") and kept.id.startswith("rk-")
        assert len(key.removeprefix(kept.id + "-")) == 43  # 256 bits, six a letter


def test_what_is_kept_fits_its_key_and_shows_nothing_of_it() -> None:
    key, kept = KeyHash.new(NOW)
    secret = key.removeprefix(kept.id)
    assert kept.fits(key)
    assert not kept.fits(key + "x") and not kept.fits(secret) and not kept.fits("")
    assert secret not in repr(kept) and secret not in kept.hash
    again = KeyHash.parse({"id": kept.id, "hash": kept.hash, "created": NOW})
    assert again == kept and again.fits(key)


def test_equal_keys_are_kept_under_different_salts() -> None:
    assert len({KeyHash.new(NOW)[1].salt for _ in range(20)}) == 20


def test_a_ring_finds_whose_key_it_is_until_it_expires() -> None:
    made = {name: KeyHash.new(NOW) for name in ("a", "b", "c")}
    late, kept = KeyHash.new(NOW)
    ends = KeyHash(kept.id, kept.salt, kept.digest, NOW, NOW + timedelta(hours=1))
    ring = Keyring([*((kept, name) for name, (_, kept) in made.items()), (ends, "b")])
    for _ in range(2):  # the second time from what is known
        assert {name: ring.find(key, NOW) for name, (key, _) in made.items()} == {
            name: name for name in made
        }
        assert ring.find(late, NOW) == "b"
    assert ring.find(late, NOW + timedelta(hours=1)) is None
    assert ring.find("rk-00000000-nobody", NOW) is None
    assert ring.find("", NOW) is None and ring.find("\udcff", NOW) is None


def test_a_key_is_compared_with_one_other_whether_or_not_it_is_anybodys(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The time tells neither where among the tenants a key is, nor that it is nowhere; and keys
    that are guessed cost no more where there are thousands."""
    made = [KeyHash.new(NOW) for _ in range(8)]
    compared: list[str] = []
    fits = KeyHash.fits

    def watched(self: KeyHash, key: str) -> bool:
        compared.append(self.id)
        return fits(self, key)

    monkeypatch.setattr(KeyHash, "fits", watched)
    forged = made[3][0][:-1] + ("A" if made[3][0][-1] != "A" else "B")
    for key, whose in (
        (made[0][0], "a"),
        (made[7][0], "a"),
        (forged, None),
        ("rk-00000000-nobody", None),
        ("", None),
    ):
        compared.clear()
        assert Keyring((kept, "a") for _, kept in made).find(key, NOW) == whose
        assert len(compared) == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"id": "sk-1"}, "id is 'sk-1'; wanted rk- and 8 hex digits"),
        ({"hash": "md5:1"}, "not sha256:SALT:DIGEST"),
        ({"created": "yesterday"}, "created of rk-0a0b0c0d is 'yesterday'; wanted a date"),
        ({"expires": 5}, "expires of rk-0a0b0c0d is 5; wanted a date"),
    ],
)
def test_a_damaged_entry_is_refused_in_words(change: dict[str, object], words: str) -> None:
    good = {
        "id": "rk-0a0b0c0d",
        "hash": f"sha256:{'0' * 32}:{'1' * 64}",
        "created": datetime(2026, 1, 1),  # without a zone: UTC
    }
    assert KeyHash.parse(good).created == NOW
    with pytest.raises(ValueError, match="wanted|not") as e:
        KeyHash.parse(good | change)
    assert words in str(e.value)
