"""The lab: several hosts on one Linux machine, each in a network namespace, over shaped links.

    with lab.Lab(hosts=4, rate_mbit=100) as net:
        run = net.start([sys.executable, "train.py"])
        run.wait(timeout_s=60)
        print(net.counters())

`lab.missing()` says what a machine lacks for it; `lab.Loopback` starts the same ranks without
hosts, on the loopback interface, where that is enough.
"""

from __future__ import annotations

from laconic.lab._hosts import Counters, Host, LabError
from laconic.lab._lab import Lab, Loopback, LoopbackNetwork, Network
from laconic.lab._rates import Rate
from laconic.lab._requirements import missing
from laconic.lab._run import Output, RankError, Run

__all__ = [
    "Counters",
    "Host",
    "Lab",
    "LabError",
    "Loopback",
    "LoopbackNetwork",
    "Network",
    "Output",
    "RankError",
    "Rate",
    "Run",
    "missing",
]
