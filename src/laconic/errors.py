"""The errors laconic raises on purpose. Each message says what to do next."""


class LaconicError(Exception):
    """Base of all errors that laconic raises on purpose."""


class ConfigError(LaconicError, ValueError):
    """A setting that cannot work, found when the object is made."""


class WireError(LaconicError, ValueError):
    """Bytes that no encoder with these settings could have produced."""


class LostError(LaconicError, ConnectionError):
    """Another rank ended, hung or was cut off: what was to come from it will not come."""


class ReplicaError(LaconicError, RuntimeError):
    """Ranks that should hold the same bits hold different ones."""
