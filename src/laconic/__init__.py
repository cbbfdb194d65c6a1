"""laconic: data-parallel PyTorch training over thin wires."""

from laconic._key import Key
from laconic._version import __version__
from laconic._wire import Wire
from laconic.codecs import (
    BF16,
    DQSG,
    ECDQ,
    FP16,
    NDQSG,
    QSGD,
    Codec,
    Feedback,
    Global,
    GlobalExp,
    Place,
    QSGDTopK,
    Rotate,
    Uncompressed,
    codec,
    codecs,
    wrappers,
)
from laconic.errors import ConfigError, LaconicError, WireError
from laconic.exchanges import AllGather, AllReduce, Exchange, ScatterReduce, Tree, exchanges, pair
from laconic.integrations import HookState, Policy, Stats, comm_hook, compress

__all__ = [
    "BF16",
    "DQSG",
    "ECDQ",
    "FP16",
    "NDQSG",
    "QSGD",
    "AllGather",
    "AllReduce",
    "Codec",
    "ConfigError",
    "Exchange",
    "Feedback",
    "Global",
    "GlobalExp",
    "HookState",
    "Key",
    "LaconicError",
    "Place",
    "Policy",
    "QSGDTopK",
    "Rotate",
    "ScatterReduce",
    "Stats",
    "Tree",
    "Uncompressed",
    "Wire",
    "WireError",
    "__version__",
    "codec",
    "codecs",
    "comm_hook",
    "compress",
    "exchanges",
    "pair",
    "wrappers",
]
