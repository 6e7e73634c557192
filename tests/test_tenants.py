"""``tenants.toml``: what may stand in it, how it is edited, and that it is read when it changes."""

from __future__ import annotations

import logging
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from radixkv.errors import InvalidConfig
from radixkv.service.tenant_shares import claims_on
from radixkv.service.tenants import SETTINGS, CacheShare, Roster, Tenant, read_tenants
from radixkv.service.tenants_edit import add_tenant, remove_key, remove_tenant, rotate_key
from radixkv.service.tenants_file import TenantsFile
from tests.tenant_files import write_tenants

NOW = datetime.now(UTC)


def names_found(file: Path, *keys: str, now: datetime | None = None) -> list[str | None]:
    roster = read_tenants(file)
    found = [roster.find(key, now or datetime.now(UTC)) for key in keys]
    return [tenant.name if tenant else None for tenant in found]


def test_every_setting_is_read_as_it_was_written(tmp_path: Path) -> None:
    file = tmp_path / "tenants.toml"
    file.write_text(
        '[tenants.acme]\nrole = "admin"\nweight = 2\ncache_quota = "25%"\ncache_floor = 64\n'
        "requests_per_minute = 600\ntokens_per_minute = 100_000\nmax_concurrent = 16\n"
        "max_queued = 0\n[tenants.other-one]\n"
    )
    assert dict(read_tenants(file)) == {
        "acme": Tenant(
            "acme",
            role="admin",
            weight=2.0,
            cache_quota=CacheShare(25, "%"),
            cache_floor=CacheShare(64, "blocks"),
            requests_per_minute=600,
            tokens_per_minute=100_000,
            max_concurrent=16,
            max_queued=0,
        ),
        "other-one": Tenant("other-one"),
    }


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[tenant.a]", "unknown key 'tenant'; did you mean tenants?"),
        ("tenants = 3", "wanted one [tenants.NAME] a tenant"),
        ("[tenants]\na = 3", "[tenants.a] is no table"),
        ("[tenants.a]\nwieght = 2", "[tenants.a]: unknown key 'wieght'; did you mean weight?"),
        ("[tenants.a]\nzzz = 2", "unknown key 'zzz'. Accepted keys: role, weight, cache_quota"),
        ("[tenants.a]\nrole = 'root'", "role is 'root'; accepted: user, admin"),
        ("[tenants.a]\nweight = 0", "weight is 0; wanted 0.001 to 1000"),
        ("[tenants.a]\nweight = 'x'", "weight is 'x'; wanted a number"),
        ("[tenants.a]\ncache_quota = '101%'", "cache_quota is '101%'; wanted a number of blocks"),
        ("[tenants.a]\ncache_quota = 1.5", "cache_quota is 1.5; wanted a number of blocks"),
        ("[tenants.a]\ncache_quota = '2 lots'", "wanted a number of bytes or a size"),
        ("[tenants.a]\ncache_quota = '5%'\ncache_floor = '6%'", "cache_floor is above"),
        ("[tenants.a]\nrequests_per_minute = 0", "wanted a whole number from 1"),
        ("[tenants.a]\nmax_concurrent = true", "wanted a whole number from 1"),
        ("[tenants.a]\nmax_queued = -1", "wanted a whole number from 0"),
        ("[tenants.A]", "the name 'A' is not accepted"),
        ("[tenants.local]", "the name 'local' is reserved"),
        ("[tenants.public]", "the name 'public' is reserved"),
        ("[tenants.a]\ncache_floor='60%'\n[tenants.b]\ncache_floor='60%'", "together are 120%"),
        ("[tenants.a]\nkeys = 3", "keys is no list of tables"),
        ("[[tenants.a.keys]]\nid = 'x'", "wanted rk- and 8 hex digits"),
        ("[[tenants.a.keys]]\nkey = 'x'", "unknown key 'key'"),
        ("[tenants.a", "cannot be read"),
    ],
)
def test_what_does_not_belong_is_refused_with_its_place_and_a_hint(
    tmp_path: Path, text: str, words: str
) -> None:
    file = tmp_path / "tenants.toml"
    file.write_text(text)
    with pytest.raises(InvalidConfig) as e:
        read_tenants(file)
    assert words in str(e.value)
    assert "tenants.toml" in str(e.value)


def test_the_same_key_twice_is_refused(tmp_path: Path) -> None:
    file, _ = write_tenants(tmp_path, a={})
    file.write_text(file.read_text() + file.read_text().replace("tenants.a", "tenants.b"))
    with pytest.raises(InvalidConfig, match="is there twice"):
        read_tenants(file)


def test_a_share_is_blocks_whatever_its_unit() -> None:
    pool = {"num_blocks": 1000, "bytes_per_block": 4096}
    for text, blocks in ((64, 64), ("25%", 250), ("0.05%", 0), ("1MiB", 256), ("100%", 1000)):
        share = CacheShare.parse(text, "cache_quota")
        assert share.blocks(**pool) == blocks
        assert str(share)


def test_floors_that_the_pool_cannot_keep_are_refused_with_the_numbers() -> None:
    tenants = {
        "a": Tenant("a", cache_floor=CacheShare(600, "blocks")),
        "b": Tenant("b", cache_floor=CacheShare(50, "%")),
    }
    with pytest.raises(InvalidConfig, match=r"1100 blocks \(a 600, b 500\), and the pool has 1000"):
        claims_on(tenants, num_blocks=1000, bytes_per_block=4096)
    fits = claims_on(tenants, num_blocks=1200, bytes_per_block=4096)
    assert (fits["a"].floor, fits["b"].floor, fits["a"].quota) == (600, 600, None)
    small = {
        "a": Tenant("a", cache_quota=CacheShare(10, "%"), cache_floor=CacheShare(200, "blocks"))
    }
    with pytest.raises(InvalidConfig, match="floor of no more than the quota"):
        claims_on(small, num_blocks=1000, bytes_per_block=4096)


def test_an_added_tenants_key_opens_and_the_file_is_for_its_owner_alone(tmp_path: Path) -> None:
    file, keys = write_tenants(tmp_path, acme={"weight": 2.0}, root={"role": "admin"})
    assert file.stat().st_mode & 0o777 == 0o600
    assert names_found(file, keys["acme"], keys["root"], "rk-x") == ["acme", "root", None]
    assert not any(key in file.read_text() for key in keys.values())
    assert [p.name for p in tmp_path.iterdir() if p.suffix not in (".toml", ".lock")] == []


def test_an_edit_leaves_the_file_readable_for_whom_it_was(tmp_path: Path) -> None:
    """A server of another user would else go on with what it knew, old keys included."""
    file = tmp_path / "tenants.toml"
    add_tenant(file, "acme", {})
    file.chmod(0o640)
    owner = (4321, 4321) if os.geteuid() == 0 else (os.geteuid(), os.getegid())
    os.chown(file, *owner)
    rotate_key(file, "acme", timedelta(0))
    found = file.stat()
    assert found.st_mode & 0o777 == 0o640
    assert (found.st_uid, found.st_gid) == owner


def test_a_rotated_key_works_beside_the_old_one_until_the_overlap_ends(tmp_path: Path) -> None:
    file, keys = write_tenants(tmp_path, acme={}, bravo={})
    fresh = rotate_key(file, "acme", timedelta(hours=1))
    assert names_found(file, keys["acme"], fresh) == ["acme", "acme"]
    later = datetime.now(UTC) + timedelta(hours=2)
    assert names_found(file, keys["acme"], fresh, keys["bravo"], now=later) == [
        None,
        "acme",
        "bravo",
    ]
    last = rotate_key(file, "acme", timedelta(0))
    assert names_found(file, keys["acme"], fresh, last) == [None, None, "acme"]


def test_a_second_rotation_does_not_prolong_what_ends_already(tmp_path: Path) -> None:
    file, keys = write_tenants(tmp_path, acme={})
    rotate_key(file, "acme", timedelta(hours=1))
    rotate_key(file, "acme", timedelta(hours=9))
    later = datetime.now(UTC) + timedelta(hours=2)
    assert names_found(file, keys["acme"], now=later) == [None]


def test_a_tenant_or_one_of_its_keys_can_be_taken_out(tmp_path: Path) -> None:
    file, keys = write_tenants(tmp_path, acme={}, bravo={})
    fresh = rotate_key(file, "acme", timedelta(hours=1))
    remove_key(file, "acme", keys["acme"][:11])
    assert names_found(file, keys["acme"], fresh) == [None, "acme"]
    remove_tenant(file, "acme")
    assert list(read_tenants(file)) == ["bravo"]
    for change in (
        lambda: remove_tenant(file, "acme"),
        lambda: remove_key(file, "bravo", "rk-00000000"),
        lambda: rotate_key(file, "nobody", timedelta(0)),
        lambda: remove_tenant(tmp_path / "no.toml", "acme"),
        lambda: add_tenant(file, "bravo", {}),
        lambda: add_tenant(file, "Bravo", {}),
        lambda: add_tenant(file, "third", {"role": "root"}),
        lambda: add_tenant(file, "third", {"cache_floor": "0.5"}),
        lambda: add_tenant(tmp_path / "no" / "tenants.toml", "third", {}),
    ):
        before = file.read_bytes()
        with pytest.raises(InvalidConfig):
            change()
        assert file.read_bytes() == before


def test_comments_and_order_outlive_an_edit(tmp_path: Path) -> None:
    file, _ = write_tenants(tmp_path, acme={"weight": 2.0})
    file.write_text(file.read_text().replace("weight = 2.0", "weight = 2.0  # they pay for it"))
    add_tenant(file, "bravo", {})
    rotate_key(file, "acme", timedelta(0))
    assert "weight = 2.0  # they pay for it" in file.read_text()
    assert list(read_tenants(file)) == ["acme", "bravo"]


def test_an_edit_that_would_break_the_file_leaves_it_alone(tmp_path: Path) -> None:
    file, _ = write_tenants(tmp_path, a={"cache_floor": "60%"})
    before = file.read_bytes()
    with pytest.raises(InvalidConfig, match="together are 110%"):
        add_tenant(file, "b", {"cache_floor": "50%"})
    assert file.read_bytes() == before


def touch(file: Path, text: str) -> None:
    """Write ``text`` with a time that differs, however coarse the clock of the file system is."""
    file.write_text(text)
    os.utime(file, ns=(0, file.stat().st_mtime_ns + 1_000_000))


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_changed_file_is_read_at_most_once_a_second(tmp_path: Path) -> None:
    file, keys = write_tenants(tmp_path, acme={})
    clock, used = Clock(), list[Roster]()
    tenants = TenantsFile(file, clock=clock)
    late = add_tenant(file, "late", {})
    tenants.poll(used.append)
    assert tenants.roster.find(late, NOW) is None, "the file was looked at less than 1 s ago"
    clock.now += 1
    tenants.poll(used.append)
    assert tenants.roster.find(late, NOW) is not None and len(used) == 1
    clock.now += 1
    tenants.poll(used.append)
    assert len(used) == 1, "nothing has changed"
    remove_tenant(file, "acme")
    clock.now += 1
    tenants.poll(used.append)
    assert tenants.roster.find(keys["acme"], NOW) is None


def test_a_broken_file_keeps_the_old_state_and_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "radixkv.tenants")
    file, keys = write_tenants(tmp_path, acme={})
    good, clock = file.read_text(), Clock()
    tenants = TenantsFile(file, clock=clock)

    def refuse(_: Roster) -> None:
        raise InvalidConfig("the floors are too high")

    def ignore(_: Roster) -> None:
        pass

    for text, use, words in (
        ("[tenants.", ignore, "cannot be read"),
        ("[tenants.acme]\nrole = 'x'", ignore, "accepted: user, admin"),
        (good, refuse, "the floors are too high"),
    ):
        caplog.clear()
        touch(file, text)
        for _ in range(3):
            clock.now += 1
            tenants.poll(use)
        (record,) = caplog.records
        assert record.levelname == "ERROR" and words in record.getMessage()
        assert tenants.roster.find(keys["acme"], NOW) is not None
    file.unlink()
    clock.now += 1
    tenants.poll(ignore)
    assert tenants.roster.find(keys["acme"], NOW) is not None
    touch(file, good + "\n[tenants.more]\n")
    clock.now += 1
    tenants.poll(ignore)
    assert "more" in tenants.roster


def test_a_server_does_not_start_with_a_file_that_lets_nobody_in(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="radixkv tenants add NAME --file"):
        TenantsFile(tmp_path / "tenants.toml")
    (tmp_path / "tenants.toml").write_text("[tenants.acme]\n")
    with pytest.raises(InvalidConfig, match="no key that opens anything"):
        TenantsFile(tmp_path / "tenants.toml")


def test_the_example_names_every_setting() -> None:
    file = Path(__file__).parents[1] / "examples" / "tenants.toml"
    (tenant,) = read_tenants(file).values()
    unset = Tenant("acme")
    same = {"role"}  # shown with its default
    assert {name for name in SETTINGS if getattr(tenant, name) == getattr(unset, name)} == same
