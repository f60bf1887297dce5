"""How many cores a process may use: control groups of both versions."""

import os

import pytest

from skinny_kernels import cores

VERSION_2, VERSION_1 = "0::/box/inner\n", "7:cpu,cpuacct:/box/inner\n4:memory:/box\n0::/\n"


def limited(tmp_path, membership, files):
    """Return the quotas of a process with these control groups."""
    lines = tmp_path / "cgroup"
    lines.write_text(membership)
    for name, text in files.items():
        path = tmp_path / "groups" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return list(cores.quotas(lines, tmp_path / "groups"))


@pytest.mark.parametrize(
    "membership, files, expected",
    [
        (VERSION_2, {"box/inner/cpu.max": "150000 100000\n"}, [1.5]),
        (VERSION_2, {"box/inner/cpu.max": "max 100000\n", "box/cpu.max": "400000 100000\n"}, [4]),
        (VERSION_2, {"cpu.max": "50000 100000\n"}, [0.5]),  # the container's own root
        (VERSION_2, {"box/inner/cpu.max": "nonsense"}, []),
        (
            VERSION_1,
            {
                "cpu/box/inner/cpu.cfs_quota_us": "200000\n",
                "cpu/box/inner/cpu.cfs_period_us": "100000\n",
                "cpu/cpu.cfs_quota_us": "-1\n",
                "cpu/cpu.cfs_period_us": "100000\n",
            },
            [2],
        ),
        ("", {}, []),
    ],
)
def test_quotas(tmp_path, membership, files, expected):
    assert limited(tmp_path, membership, files) == expected


def test_no_control_groups(tmp_path):
    assert list(cores.quotas(tmp_path / "none", tmp_path)) == []


@pytest.mark.parametrize("quota, expected", [([], 8), ([1.5], 2), ([0.3], 1), ([16, 3.2], 3)])
def test_usable_cores(monkeypatch, quota, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(8), raising=False)
    monkeypatch.setattr(cores, "quotas", lambda *paths: iter(quota))
    cores.usable_cores.cache_clear()
    try:
        assert cores.usable_cores() == expected
    finally:
        cores.usable_cores.cache_clear()
