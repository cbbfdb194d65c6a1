"""laconic: communication-efficient data-parallel training in PyTorch."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the same names for type checkers and editors
    from laconic import server as server
    from laconic._compress import compress as compress
    from laconic._key import *
    from laconic._version import __version__ as __version__
    from laconic._wire import Wire as Wire
    from laconic.codecs import *
    from laconic.errors import *
    from laconic.exchanges import *
    from laconic.integrations import *
    from laconic.planner import Auto as Auto
    from laconic.schedules import *

# Every public name, by the module that has it; imported when first used, so that
# `laconic --help` does not wait for torch.
_NAMES = {
    "_compress": "compress",
    "_version": "__version__",
    "errors": "ConfigError LaconicError LostError ReplicaError WireError",
    "_key": "Key Stream",
    "_wire": "Wire",
    "codecs": """
        BF16 Codec DQSG ECDQ FP16 Feedback Global GlobalExp NDQSG Place QSGD QSGDTopK Residuals
        Rotate Uncompressed codec codecs register_codec wrappers
    """,
    "exchanges": """
        AllGather AllReduce Choice Chooser Exchange ExchangeContext ExchangeMemory Hierarchical
        Nested Policy Ring ScatterReduce Sparse Traffic Tree exchanges pair register_exchange
    """,
    "server": "server",
    "schedules": """
        AdamRule AsyncSGD DCASGD GLU HeavyBall LocalSGD LocalSGDRule MomentumRule Nesterov QSVRG
        SSD Schedule register_schedule
    """,
    "integrations": """
        AllRanks FSDPHandle Handle HookState PerRank Stats comm_hook load log_stats save
    """,
    "planner": "Auto",
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names.split()}
_PACKAGES = ("codecs", "exchanges", "server")  # public names that are packages
_LISTINGS = ("codecs", "exchanges")  # packages that list the names in them when they are called

__all__ = sorted(_HOMES)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = import_module(f"{__name__}.{_HOMES[name]}")
    if name in _PACKAGES:
        return home
    globals()[name] = getattr(home, name)
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Imported(ModuleType):
    """Pickled by name, which cloudpickle (Ray, Dask, ..) does with plain modules alone."""

    def __reduce__(self) -> tuple[Any, ...]:
        return import_module, (self.__name__,)


class _Laconic(_Imported):
    def __setattr__(self, name: str, value: object) -> None:
        if name in _LISTINGS and isinstance(value, ModuleType):
            value.__class__ = _Listing
        super().__setattr__(name, value)


class _Listing(_Imported):
    """`laconic.codecs` is a package, and `laconic.codecs()` the names of all codecs."""

    def __call__(self) -> list[str]:
        return vars(self)[self.__name__.rpartition(".")[2]]()


sys.modules[__name__].__class__ = _Laconic
