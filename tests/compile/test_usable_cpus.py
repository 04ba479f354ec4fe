"""Compilation uses no more CPUs than the affinity and the quotas of control groups allow."""

import os

import pytest

from deft_backend.compile.variants import usable_cpus

V2, V1 = "sys/fs/cgroup", "sys/fs/cgroup/cpu"
POD = "/kubepods/pod7"


def v1(folder, quota):
    return {f"{folder}/cpu.cfs_quota_us": f"{quota}\n", f"{folder}/cpu.cfs_period_us": "100000\n"}


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("0::/", {f"{V2}/cpu.max": "200000 100000\n"}, 2),
        (f"0::{POD}/c", {f"{V2}{POD}/cpu.max": "50000 20000", f"{V2}{POD}/c/cpu.max": "max 1"}, 3),
        (f"3:cpuset:/\n2:cpuacct,cpu:{POD}", v1(V1, 400_000), 4),
        (f"2:cpu:{POD}\n0::/", {**v1(V1, -1), **v1(V1 + POD, 50_000)}, 1),
        ("0::/", {f"{V2}/cpu.max": "6400000 50000\n"}, 64),
        ("0::/", {f"{V2}/cpu.max": ""}, 64),
        ("3:cpuset:/c\n2:cpu:/", {**v1(V1, -1), **v1(f"{V1}/c", 100_000)}, 64),
        ("", {}, 64),
    ],
    ids=["v2", "parent", "v1", "half", "large", "damaged", "cpuset", "none"],
)
def test_the_least_of_affinity_and_quotas(groups, files, expected, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    for name, text in {"proc/self/cgroup": groups, **files}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert usable_cpus(tmp_path) == expected
