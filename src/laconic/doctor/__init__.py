"""The doctor: what is wrong with a host or a cluster, before a training run finds out.

laconic doctor        torchrun ... -m laconic doctor
"""

from __future__ import annotations

from laconic.doctor._doctor import Report, doctor
from laconic.doctor._finding import Finding

__all__ = ["Finding", "Report", "doctor"]
