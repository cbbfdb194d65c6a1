"""laconic: data-parallel PyTorch training over thin wires."""

from laconic._key import Key
from laconic._wire import Wire
from laconic.codecs import (
    BF16,
    DQSG,
    FP16,
    NDQSG,
    QSGD,
    Codec,
    Global,
    GlobalExp,
    QSGDTopK,
    Uncompressed,
    codec,
    codecs,
)
from laconic.errors import ConfigError, LaconicError, WireError

__version__ = "0.1.0"

__all__ = [
    "BF16",
    "DQSG",
    "FP16",
    "NDQSG",
    "QSGD",
    "Codec",
    "ConfigError",
    "Global",
    "GlobalExp",
    "Key",
    "LaconicError",
    "QSGDTopK",
    "Uncompressed",
    "Wire",
    "WireError",
    "codec",
    "codecs",
]
