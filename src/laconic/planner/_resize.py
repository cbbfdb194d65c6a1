"""A measured cluster with more workers, or fewer.

Speeds stay; starts grow with the messages that they are made of. From n to m ranks, L on a node:

    all-reduce, all-to-all   start·(m-1)/(n-1)
    all-to-all               speed·[(m-1)/(m-L)]/[(n-1)/(n-L)]: the bytes that leave a node
    global                   shares its levels among m
    κ                        φ + (1-φ)/m, with the common share φ from κ at n

That more workers might saturate a switch is not modelled.
"""

from __future__ import annotations

from dataclasses import replace

from laconic._cost import (
    Cluster,
    CodecCost,
    LinearCost,
    Links,
    Workload,
    check_workers,
    shared_levels,
)
from laconic.codecs import codec
from laconic.errors import ConfigError


def resized(
    cluster: Cluster, workload: Workload | None, workers: int
) -> tuple[Cluster, Workload | None]:
    """Cluster and workload with another number of workers, on nodes of the same kind."""
    n, per_node = cluster.workers, cluster.per_node
    if workers == n:
        return cluster, workload
    check_workers(workers)
    if workers % per_node:
        raise ConfigError(
            f"{workers} workers do not fill nodes of {per_node}: give a multiple of {per_node}"
        )
    if cluster.nodes == 1 and per_node > 1:
        raise ConfigError(
            f"all {n} workers were on one node, so nothing is known of links between nodes: probe "
            "with two nodes or more"
        )
    levels: dict[str, Links | None] = {"inside": None, "between": None}
    if workers == per_node:
        levels["flat"] = cluster.inside
    else:
        levels["flat"] = _links(cluster.flat, workers, per_node)
        if cluster.between is not None:
            between = _links(cluster.between, workers // per_node, 1)
            levels |= {"inside": cluster.inside, "between": between}
    codecs = tuple(_codec(cost, n, workers) for cost in cluster.codecs)
    changed = replace(cluster, workers=workers, codecs=codecs, **levels)
    if workload is None or workload.kappa is None:
        return changed, workload
    common = max(0.0, (n * workload.kappa - 1) / (n - 1))
    return changed, replace(workload, kappa=common + (1 - common) / workers)


def _links(links: Links, ranks: int, per_node: int) -> Links:
    more = (ranks - 1) / (links.ranks - 1)
    leaving = (links.ranks - per_node) / (links.ranks - 1) * (ranks - 1) / (ranks - per_node)

    def longer(line: LinearCost) -> LinearCost:
        return replace(line, start_s=line.start_s * more)

    return Links(
        ranks=ranks,
        allreduce=tuple(map(longer, links.allreduce)),
        all_to_all=longer(links.all_to_all).faster(leaving),
        sendrecv=links.sendrecv,
    )


def _codec(cost: CodecCost, before: int, after: int) -> CodecCost:
    own = codec(cost.spec)
    if not (own.shared_norm and own.summable):
        return cost
    return cost.with_levels(shared_levels(own, before) / shared_levels(own, after))
