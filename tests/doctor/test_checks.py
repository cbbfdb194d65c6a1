"""Every check of the doctor on facts that are given: nothing depends on this machine."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import PATIENCE_S
from programs import free_port

import laconic as lc
from laconic.doctor import Finding, doctor
from laconic.doctor._addresses import interfaces, port_is_free, unreachable
from laconic.doctor._facts import FRAMEWORKS, Facts, cpus, facts, free_memory
from laconic.doctor._group import GroupState, backends_to_try, check_groups
from laconic.doctor._kernels import KernelState, check_kernels, kernel_states
from laconic.doctor._links import PairCost, check_links, pairs
from laconic.doctor._machine import (
    Offset,
    check_clocks,
    check_memory,
    check_monotonic,
    check_threads,
)
from laconic.doctor._meeting import Seat, within
from laconic.doctor._network import check_addresses, check_port, gloo_address
from laconic.doctor._software import TESTED, check_backends, check_frameworks, check_versions
from laconic.kernels import _numba, choice

CPU = torch.device("cpu")


def row(rank: int = 0, **changes: Any) -> Facts:
    """A rank of its own host, with nothing wrong."""
    usual = Facts(
        rank=rank,
        host=f"node{rank}",
        node=str(rank),
        versions={"Python": "3.12.1", "torch": "2.9.0", "numba": "0.68", "laconic": "0.1.0"},
        frameworks={"lightning": f"{TESTED['lightning']}.3"},
        backends=("gloo",),
        gpus=0,
        interfaces={"lo": "127.0.0.1", "docker0": "172.17.0.1", "eth0": f"10.0.0.{rank + 1}"},
        name_address=f"10.0.0.{rank + 1}",
        route=f"10.0.0.{rank + 1}",
        gloo_interface="",
        nccl_interface="",
        cpus=8,
        threads=4,
        local_ranks=1,
        memory_bytes=16 << 30,
    )
    return replace(usual, **changes)


def only(found: Iterable[Finding]) -> Finding:
    (one,) = found
    return one


def wrong(found: Iterable[Finding]) -> Finding:
    """The only problem."""
    return only(one for one in found if not one.ok)


def test_facts_survive_their_way_and_others_are_refused() -> None:
    mine = facts(3, {"LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1", "GLOO_SOCKET_IFNAME": "eth7"})
    assert Facts.from_json(mine.to_json()) == mine
    assert (mine.rank, mine.local_ranks, mine.node, mine.gloo_interface) == (3, 2, "1", "eth7")
    assert mine.versions["torch"] == torch.__version__ and mine.cpus >= 1
    with pytest.raises(ValueError, match="versions"):
        Facts.from_json(mine.to_json().replace('"versions": {', '"versions": 3, "other": {'))


# Software


def test_equal_versions_are_fine() -> None:
    found = only(check_versions([row(0), row(1)]))
    assert found.ok and "torch 2.9.0" in found.text and "Python 3.12.1" in found.text


def test_ranks_with_other_versions_are_named() -> None:
    other = row(1, versions={**row().versions, "torch": "2.8.1"})
    found = wrong(check_versions([row(0), other, row(2), row(3)]))
    assert found.ranks == (1,) and "torch is 2.8.1 on rank 1, 2.9.0 on" in found.text
    bare = {name: version for name, version in row().versions.items() if name != "numba"}
    assert (
        "missing on ranks 1, 2"
        in wrong(
            check_versions([row(0), *(row(i, versions=bare) for i in (1, 2)), row(3), row(4)])
        ).text
    )
    assert "pip install numba" in only(check_versions([row(versions=bare)])).advice


def test_a_rank_that_is_missing_does_not_shift_the_others() -> None:
    other = row(4, versions={**row().versions, "laconic": "0.0.9"})
    assert wrong(check_versions([row(0), row(2), other])).ranks == (4,)


def test_backends() -> None:
    assert only(check_backends([row(0), row(1)])).ok
    assert wrong(check_backends([row(0), row(1, backends=())])).ranks == (1,)
    other = row(1, backends=("gloo", "mpi"))
    assert "rank 1 has gloo, mpi" in wrong(check_backends([row(0), other])).text
    found = wrong(check_backends([row(0, gpus=1), row(1, gpus=1)]))
    assert "no nccl" in found.text and found.ranks == (0, 1)
    assert only(check_backends([row(gpus=1, backends=("gloo", "nccl"))])).ok


def test_frameworks_are_compared_with_those_that_are_tested() -> None:
    found = only(check_frameworks([row(0), row(1)]))
    assert found.ok and "(tested)" in found.text and not found.advice
    other = [row(0, frameworks={"peft": "0.1.0"})]
    assert "peft 0.1.0 (not tested)" in only(check_frameworks(other)).text
    assert f"peft {TESTED['peft']}" in only(check_frameworks(other)).advice
    assert only(check_frameworks([row(frameworks={})])).text == "none found"
    assert wrong(check_frameworks([row(0), row(1), row(2, frameworks={})])).ranks == (2,)


def test_the_versions_that_are_tested_are_those_of_the_constraints() -> None:
    text = (Path(__file__).parents[2] / "constraints.txt").read_text()
    assert {*TESTED} == {*FRAMEWORKS}
    for name, version in TESTED.items():
        assert re.search(rf"^{name}=={re.escape(version)}\.", text, re.MULTILINE), name


# Network


def test_a_host_whose_name_leads_to_itself_is_found() -> None:
    """Debian and Ubuntu write 127.0.1.1 beside the host's name into /etc/hosts."""
    found = wrong(check_addresses([row(0), row(1, name_address="127.0.1.1")]))
    assert found.ranks == (1,) and "node1" in found.text and "127.0.1.1" in found.text
    assert "GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME=eth0" in found.advice


def test_the_interface_on_the_way_to_the_master_is_advised() -> None:
    own = {"eth0": "192.168.0.7", "ib0": "10.1.0.7"}
    rows = [row(0), row(1, name_address="127.0.1.1", interfaces=own, route="10.1.0.7")]
    assert "GLOO_SOCKET_IFNAME=ib0" in wrong(check_addresses(rows)).advice
    rows[1] = replace(rows[1], route=None)
    assert "GLOO_SOCKET_IFNAME=eth0" in wrong(check_addresses(rows)).advice


def test_an_interface_that_is_named_overrides_the_hosts_name() -> None:
    rows = [row(i, name_address="127.0.1.1", gloo_interface="eth0") for i in range(2)]
    found = only(check_addresses(rows))
    assert found.ok and "10.0.0.1 on node0, 10.0.0.2 on node1" in found.text
    found = wrong(check_addresses([row(0), row(1, gloo_interface="lo")]))
    assert "GLOO_SOCKET_IFNAME=lo" in found.text and found.ranks == (1,)


def test_the_loopback_interface_does_for_one_host() -> None:
    rows = [row(i, host="node", node="0", name_address="127.0.1.1") for i in range(2)]
    found = only(check_addresses(rows))
    assert found.ok and "127.0.1.1" in found.text and "GLOO_SOCKET_IFNAME=eth0" in found.advice


@pytest.mark.parametrize("name_address", [None, "10.9.9.9"])
def test_gloo_takes_the_loopback_interface_where_a_name_leads_nowhere(name_address: Any) -> None:
    assert gloo_address(row(name_address=name_address)) == "127.0.0.1"
    assert wrong(check_addresses([row(0), row(1, name_address=name_address)])).ranks == (1,)


@pytest.mark.parametrize(
    ("variable", "value", "fine"),
    [
        ("gloo_interface", "eth9", False),
        ("gloo_interface", "eth", False),
        ("gloo_interface", "eth0,docker0", True),
        ("nccl_interface", "eth", True),
        ("nccl_interface", "^docker0", True),
        ("nccl_interface", "ib", False),
    ],
)
def test_interfaces_that_are_not_there_are_found(variable: str, value: str, fine: bool) -> None:
    found = [*check_addresses([row(0, **{variable: value})])]
    assert all(one.ok for one in found) == fine
    if not fine:
        assert value in found[0].text and "eth0" in found[0].text and found[0].ranks == (0,)


def test_an_address_that_every_host_has_is_found() -> None:
    rows = [row(i, name_address="172.17.0.1") for i in range(2)]
    found = wrong(check_addresses(rows))
    assert found.ranks == (0, 1) and "172.17.0.1" in found.text and "eth0" in found.advice


def test_the_port_of_the_master() -> None:
    free, busy = (lambda port: True), (lambda port: False)
    assert check_port("", 29500, given=False, free=free).ok
    found = check_port("", 29500, given=False, free=busy)
    assert not found.ok and "29500" in found.text and "--master-port 29501" in found.advice

    def told(why: str | None) -> Finding:
        return check_port("node0", 29500, given=True, why_not=lambda *words: why)

    assert told(None).ok and told("nothing listens there").ok
    found = told("the name node0 does not resolve")
    assert not found.ok and "node0:29500" in found.text and "not resolve" in found.text


def test_ports_of_this_host() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert unreachable("127.0.0.1", port, PATIENCE_S) is None and not port_is_free(port)
    closed = free_port()
    assert unreachable("127.0.0.1", closed, 0.1) == "nothing listens there"
    assert "does not resolve" in (unreachable("nobody.invalid", closed, 0.1) or "")
    assert interfaces().get("lo", "127.0.0.1") == "127.0.0.1"


# Hosts


def test_more_threads_than_cpus_are_found() -> None:
    rows = [row(i, host="node", node="0", local_ranks=4, threads=8, cpus=8) for i in range(4)]
    found = wrong(check_threads(rows))
    assert found.ranks == (0, 1, 2, 3) and "4 ranks of 8 threads on 8 CPUs" in found.text
    assert found.advice == "export OMP_NUM_THREADS=2"
    rows = [replace(one, threads=1, cpus=2) for one in rows]
    assert "2 ranks per host at most" in wrong(check_threads(rows)).advice
    assert only(check_threads([row(0), row(1)])).ok


def test_a_container_may_use_its_quota(tmp_path: Path) -> None:
    every = cpus(tmp_path)
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert cpus(tmp_path) == every >= 1
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    assert cpus(tmp_path) == 1


def test_memory(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:   2048 kB\n")
    assert free_memory(tmp_path / "meminfo") == 2 << 20
    assert free_memory(tmp_path / "nothing") is None
    assert only(check_memory([row(0)])).ok and only(check_memory([row(memory_bytes=None)])).ok
    found = wrong(check_memory([row(0), row(1, memory_bytes=4 << 30, local_ranks=8)]))
    assert found.ranks == (1,) and "537 MB" in found.text


def test_clocks_that_differ_are_found() -> None:
    near = Offset(rank=1, ahead_s=0.02, within_s=0.001)
    assert only(check_clocks([near])).ok and only(check_clocks([])).ok
    assert only(check_clocks([Offset(rank=1, ahead_s=3.0, within_s=2.5)])).ok  # a slow network
    found = wrong(check_clocks([near, Offset(rank=2, ahead_s=-90.0, within_s=0.001)]))
    assert found.ranks == (2,) and "90 s behind" in found.text
    assert not [*check_monotonic(5.0, 5.1)]
    assert "moved 3600 s" in only(check_monotonic(3605.0, 5.0)).text


# Groups and links


def test_process_groups() -> None:
    good, bad = GroupState(backend="gloo", reduce_s=1e-3), GroupState(backend="gloo", wrong="lost")
    assert "1.0 ms" in only(check_groups([(0, good), (1, good)], 2)).text
    found = only(check_groups([(0, good), (1, bad), (2, bad)], 3))
    assert not found.ok and found.ranks == (1, 2) and "lost" in found.text
    assert backends_to_try([row(0), row(1)]) == ["gloo"]
    own = {"backends": ("gloo", "nccl"), "local_ranks": 2}
    assert backends_to_try([row(0, gpus=2, **own)]) == ["gloo", "nccl"]
    assert backends_to_try([row(0, gpus=1, **own)]) == ["gloo"]


def cost(first: int, second: int, mbit: float) -> PairCost:
    return PairCost(ranks=(first, second), tiny_s=4e-4, bit_s=mbit * 1e6)


def test_links_that_differ_are_found() -> None:
    rows = [row(0), row(1), row(2)]
    every = [cost(0, 1, 930), cost(0, 2, 95), cost(1, 2, 940)]
    found = only(check_links(every, rows))
    assert not found.ok and found.ranks == (0, 2) and "10 times" in found.advice
    assert "slowest ranks 0 and 2: 95 Mbit/s" in found.text
    assert "fastest ranks 1 and 2: 940 Mbit/s" in found.text and "400 µs" in found.text


def test_links_inside_a_host_may_be_faster() -> None:
    rows = [row(0), row(1, host="node0", node="0"), row(2)]
    every = [cost(0, 1, 20000), cost(0, 2, 95), cost(1, 2, 94)]
    assert only(check_links(every, rows)).ok
    assert not [*check_links([], rows[:1])]
    assert only(check_links(every[:1], rows)).text.startswith("ranks 0 and 1: 20,000 Mbit/s")


def test_many_ranks_are_measured_in_a_ring() -> None:
    assert len(pairs(8)) == 28 and len(pairs(64)) == 64 and pairs(64)[-1] == (63, 0)


# Kernels


def test_kernels_of_this_machine_are_right() -> None:
    states = kernel_states([CPU])
    assert [(one.device, one.form, one.wrong) for one in states] == [("cpu", "numba", "")]
    assert "cpu numba" in only(check_kernels([(0, states[0]), (1, states[0])])).text


def test_kernels_that_make_other_bytes_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    own = _numba.quantize

    def broken(x: Any, scale: Any, codes: Any, *rest: Any, **options: Any) -> None:
        own(x, scale, codes, *rest, **options)
        if x.numel() == 129:
            codes[5] += 1

    monkeypatch.setattr(_numba, "quantize", broken)
    found = only(check_kernels([(2, state) for state in kernel_states([CPU])]))
    assert not found.ok and found.ranks == (2,) and "numba" in found.advice
    assert "qsgd:bits=4" in found.text and "129" in found.text and "numba" in found.text


def test_kernels_that_do_not_load_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*words: Any, **options: Any) -> None:
        raise OSError("libLLVM.so: cannot open\nshared object")

    monkeypatch.setattr(_numba, "quantize", broken)
    (state,) = kernel_states([CPU])
    assert state.wrong == "OSError: libLLVM.so: cannot open shared object"


def test_a_device_without_kernels_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from laconic.kernels import _choice

    monkeypatch.delitem(_choice._BY_DEVICE, "cpu")
    monkeypatch.setattr(_choice, "VALUES", 1000)
    choice.cache_clear()
    try:
        (state,) = kernel_states([CPU])
    finally:
        choice.cache_clear()
    assert state.form in ("staged", "torch") and "staged" in state.why and not state.wrong


def test_a_rank_that_says_nothing_of_its_kernels_is_a_problem() -> None:
    silent = KernelState(device="a device", form="unknown", why="", wrong="no answer in time")
    assert wrong(check_kernels([(1, silent)])).ranks == (1,)


# Meeting

TOLD = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}


def test_what_torchrun_tells() -> None:
    assert Seat.of({}) is None and Seat.of({"MASTER_ADDR": "node0"}) is None
    seat = Seat.of({**TOLD, "TORCHELASTIC_USE_AGENT_STORE": "True"})
    assert seat and (seat.rank, seat.size, seat.port, seat.hosted) == (1, 2, 29511, True)


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("MASTER_ADDR", "", "MASTER_ADDR: torchrun sets all four"),
        ("RANK", "one", "RANK is a number, not 'one'"),
        ("RANK", "2", "below WORLD_SIZE"),
        ("MASTER_PORT", "70000", "1 to 65535"),
        ("LOCAL_RANK", "x", "LOCAL_RANK is a number"),
    ],
)
def test_what_torchrun_would_not_tell(name: str, value: str, sentence: str) -> None:
    with pytest.raises(lc.ConfigError, match=sentence):
        Seat.of({**TOLD, name: value})


def test_a_master_that_is_not_there_is_a_problem_of_this_rank() -> None:
    found = doctor(timeout_s=0.3, environ={**TOLD, "MASTER_PORT": str(free_port())})
    assert not found.ok and found.rank == 1 and "cannot be reached" in wrong(found.findings).text


def test_a_time_that_is_none() -> None:
    with pytest.raises(lc.ConfigError, match="timeout_s"):
        doctor(timeout_s=0)


def test_what_hangs_is_left_behind() -> None:
    forever = threading.Event()
    with pytest.raises(TimeoutError, match=r"0\.05 s"):
        within(0.05, forever.wait)
    forever.set()
    assert within(PATIENCE_S, lambda: 7) == 7
    with pytest.raises(KeyError):
        within(PATIENCE_S, lambda: {}["x"])
