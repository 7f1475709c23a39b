"""Lists of drives to serve, read from files."""

from pathlib import Path

import pytest

from csd_io.medium import Medium
from csd_link.nvmeof.listen import AllowedHost
from csd_link.window import WindowLayout
from csd_spec.presets import DRIVES, INSTCSD_ZYNQ7045_8CH
from nvmevirt_config import load_config
from nvmevirt_config.serve_config import check_files, load_hosts

DOCS = Path(__file__).parents[2] / "docs"


def test_serve_file_of_docs_is_read(tmp_path):
    text = (DOCS / "drives.md").read_text().partition("```yaml\n")[2].partition("```")[0]
    (tmp_path / "drives.yaml").write_text(text)
    first, second = load_config(tmp_path / "drives.yaml").drives
    assert (first.name, first.spec, first.tenants) == ("csd0", DRIVES["instcsd-overlapped"], ("alice", "bob"))
    assert (first.path, first.mount) == (tmp_path / "flash/csd0", tmp_path / "mnt/csd0")
    assert first.methods_file == tmp_path / "strided.py"
    assert (second.spec, second.device, second.offset_bytes) == (
        INSTCSD_ZYNQ7045_8CH,
        Path("/dev/shm/guest-ram"),
        1074790400,
    )
    assert second.layout == WindowLayout(depth=8, slot_blocks=8192)
    assert (first.durability, first.storage, first.threads) == ("host", Medium("direct", 512 << 20), 2)
    assert (second.durability, second.storage, second.threads) == (None, Medium("memory"), None)
    assert first.restarts
    assert second.restarts


def test_restart_false_applies_to_all_drives(tmp_path):
    (tmp_path / "drives.yaml").write_text("drives: [{name: a}, {name: b}]\nrestart: false")
    assert [drive.restarts for drive in load_config(tmp_path / "drives.yaml").drives] == [False, False]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "must be an object, got None"),
        ("drives: []", "there is none"),
        ("drives: [5]", "drives.0.: must be an object, got 5"),
        ("drives: [{name: a, restart: false}]", "drives.0..restart: no such field"),
        ("drives: [{name: a, drive: {name: x}}]", "drives.0..drive.description.geometry: is missing"),
        ("drives: [{name: a, drive: nowhere}]", "'nowhere': neither a file nor a preset"),
        ("drives: [{name: a, durability: much}]", "drives.0..durability: must be 'process' or 'host', got 'much'"),
        ("drives: [{name: a, medium: direct}]", "medium = direct: needs a folder"),
        ("drives: [{name: a, threads: 0}]", "drives.0..threads: must be greater than or equal to 1, got 0"),
        ("drives: [{name: 7}]", "drives.0..name: must be a valid string, got 7"),
        ("drives: [{name: a, path: 5}]", "drives.0..path: must be a valid string, got 5"),
        ("drives: [{name: a, layout: {depth: 8.5}}]", "drives.0..layout.depth: must be a valid integer, got 8.5"),
        ("drives: [{name: a, tenants: alice}]", "drives.0..tenants.list: must be a valid array, got 'alice'"),
        ("drives: [{name: a, tenants: {x: {share: 0}}}]", "x.share: must be greater than 0, got 0"),
        ("drives: [{name: a, tenants: {x: {part: 0.5}}}]", "x.part: no such field"),
        ("drives: [{name: a, tenants: {x: {share: 0.7}, y: {share: 0.7}}}]", "shares 0.7, 0.7: .* at most 1"),
        ("drives: [{name: a, tenants: {x: {share: 1}, y: {}}}]", "shares 1, 0: each must be above 0"),
        ("drives: [{name: a}]\nrestart: 'no'", "restart: must be a valid boolean, got 'no'"),
    ],
)
def test_invalid_serve_file_is_named(tmp_path, text, reason):
    (tmp_path / "drives.yaml").write_text(text)
    with pytest.raises(ValueError, match=reason) as error:
        load_config(tmp_path / "drives.yaml")
    assert "drives.yaml" in str(error.value)


SAME = [
    ("mount: m", "mount: m/"),
    ("mount: m", "mount: ./m"),
    ("mount: m", "mount: x/../m"),
    ("mount: m", "mount: $HERE/m"),
    ("mount: m", "mount: link"),
    ("mount: m", "mount: m/inner"),
    ("mount: m/inner", "mount: m"),
    ("path: m", "path: link/inner"),
    ("path: m/inner", "mount: m"),
    ("mount: m", "mount: ~/m"),
    ("device: w", "device: ./w, offset_bytes: 4096"),
]


@pytest.mark.parametrize(("first", "second"), SAME)
def test_drives_with_one_place_are_refused(tmp_path, monkeypatch, first, second):
    monkeypatch.setenv("HERE", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "m").mkdir()
    (tmp_path / "link").symlink_to("m")
    (tmp_path / "drives.yaml").write_text(f"drives: [{{name: a, {first}}}, {{name: b, {second}}}]")
    with pytest.raises(ValueError, match=r"drives.yaml: drives [ab] and [ab]: ") as error:
        load_config(tmp_path / "drives.yaml")
    assert "\n" not in str(error.value)
    apart = f"drives: [{{name: a, {first}}}, {{name: b, mount: other, path: m2, device: w2}}]"
    (tmp_path / "drives.yaml").write_text(apart)
    assert len(load_config(tmp_path / "drives.yaml").drives) == 2


def test_mount_over_own_flash_is_refused(tmp_path):
    (tmp_path / "drives.yaml").write_text("drives: [{name: a, path: m/flash, mount: m}]")
    with pytest.raises(ValueError, match="hides the folder of its flash"):
        load_config(tmp_path / "drives.yaml")


def test_missing_files_and_files_instead_of_folders_are_named(tmp_path):
    (tmp_path / "file").touch()
    for place, says in (
        ("methods_file: no.py", "methods_file: .*no.py: no such file"),
        ("mount: file", "mount: .*not a folder"),
    ):
        (tmp_path / "drives.yaml").write_text(f"drives: [{{name: a, {place}}}]")
        with pytest.raises(ValueError, match=f"a: {says}"):
            check_files(load_config(tmp_path / "drives.yaml").drives)


def test_tenants_without_share_divide_the_rest(tmp_path):
    tenants = "{a: {share: 0.5}, b: {}, c: {}}", "{a: {}, b: {}}", "[a, b]", "{a: {share: 0.5}}"
    each = ", ".join(f"{{name: d{number}, tenants: {tenant}}}" for number, tenant in enumerate(tenants))
    (tmp_path / "drives.yaml").write_text(f"drives: [{each}]")
    drives = load_config(tmp_path / "drives.yaml").drives
    assert [tuple(map(drive.share_of, drive.tenants)) for drive in drives] == [
        (0.5, 0.25, 0.25),
        (0.5, 0.5),
        (0.5, 0.5),
        (0.5,),
    ]
    assert [drive.layout.slot_blocks for drive in drives] == [512, 512, 512, 8192]


def test_hosts_file_of_docs_is_read(tmp_path):
    text = (DOCS / "nvme.md").read_text().partition("```yaml\n")[2].partition("```")[0]
    (tmp_path / "hosts.yaml").write_text(text)
    first, second = load_hosts(tmp_path / "hosts.yaml")
    assert first == AllowedHost("nqn.2014-08.org.nvmexpress:uuid:1b4e28ba-2fa1-11d2-883f-0016d3cca427", "alice")
    assert second.tenant == "bob"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("hosts: {}", "is empty"),
        ("{}", "hosts: is missing"),
        ("hosts: {somebody: alice}", "'somebody' must be an NVMe qualified name"),
        (f"hosts: {{nqn.{'x' * 220}: alice}}", "at most 223 bytes"),
        ("hosts: {nqn.a: ''}", "nqn.a: has no tenant"),
        ("hosts: {nqn.a: alice, nqn.a: bob}", "a key is given twice"),
        ("hosts: {nqn.a: 1}", "must be a valid string"),
    ],
)
def test_invalid_hosts_file_is_refused(tmp_path, text, reason):
    (tmp_path / "hosts.yaml").write_text(text)
    with pytest.raises(ValueError, match=reason) as refused:
        load_hosts(tmp_path / "hosts.yaml")
    assert str(tmp_path / "hosts.yaml") in str(refused.value)
