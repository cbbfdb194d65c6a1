"""What a policy's answers mean: codecs and exchanges, by the texts that name them."""

from __future__ import annotations

from laconic.codecs import Codec
from laconic.errors import ConfigError
from laconic.exchanges import Exchange, pair
from laconic.exchanges._policy import Choice


class Choices(dict[str, tuple[Codec, Exchange]]):
    """Codec and exchange by text; the empty text is for parameters without a codec of their own."""

    def __init__(self, spec: str | Codec, exchange: str | Exchange | None) -> None:
        super().__init__({"": pair(spec, exchange)})
        self.exchange_named = exchange is not None or _names_exchange(spec)

    def text(self, choice: Choice) -> str | None:
        """The text for a policy's answer; None for values that travel as they are."""
        if isinstance(choice, bool) or choice == "none":
            return "" if choice is True else None
        text = str(choice)
        if text not in self:
            self[text] = pair(choice)
            self.exchange_named |= _names_exchange(choice)
        return text


def line(path: str, tensor: object, text: str | None) -> str:
    """A parameter and what happens to it, as ranks compare it."""
    shape, dtype = tuple(tensor.shape), tensor.dtype  # pyright: ignore[reportAttributeAccessIssue]
    return f"{path} {shape} {dtype} {'plain' if text is None else text or 'encoded'}"


def check_warmup(warmup_steps: int) -> None:
    """ConfigError unless it is a number of steps."""
    if not isinstance(warmup_steps, int) or warmup_steps < 0:
        raise ConfigError(f"warmup_steps must be an integer from 0, not {warmup_steps!r}")


def _names_exchange(spec: str | Codec) -> bool:
    return isinstance(spec, str) and "@" in spec
