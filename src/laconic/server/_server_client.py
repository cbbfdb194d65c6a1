"""A worker's side: gradients to all servers, weights from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from laconic._scratch import Scratch
from laconic._wire import ALIGN
from laconic.codecs import Codec
from laconic.comm._context import ExchangeMemory
from laconic.errors import WireError
from laconic.exchanges._side_information import at_ratio, plain_codec
from laconic.server._link import Flag, Frame, Kind, Link, Roles
from laconic.server._request_queue import pack_settings
from laconic.server._shard_server import HOST, Chunk
from laconic.sharding._flat_parameters import FlatParameters
from laconic.sharding._shard import Settings, apply_delta


@dataclass(frozen=True, kw_only=True)
class Push:
    """A gradient, as all servers get it, each its chunk."""

    step: int
    g: Tensor
    codec: Codec
    flags: Flag
    settings: Settings


def flags_of(codec: Codec, pull_codec: Codec | None) -> Flag:
    """What a push and its answer are coded with; None: no weights in the answer."""
    flags = Flag.PLAIN if codec.lossless else Flag.NONE
    if pull_codec is not None:
        flags |= Flag.PULL if pull_codec.lossless else Flag.PULL | Flag.CODED
    return flags


class ServerClient:
    """Weights that servers keep. `whose`: the number that names the draws of coded pulls."""

    def __init__(
        self,
        flat: FlatParameters,
        roles: Roles,
        seed: int,
        pull_codec: Codec,
        whose: int,
        memory: ExchangeMemory,
    ) -> None:
        self._flat, self._roles, self._pull_codec, self._whose = flat, roles, pull_codec, whose
        self._chunks = [Chunk(flat, s, roles.lane, seed, memory) for s in range(roles.servers)]
        self._sent_settings: Settings | None = None
        self._scratch = Scratch()
        self.versions = [0] * roles.servers  # of the weights that were read last
        self.ratios = [0] * roles.servers  # of ndqsg, from servers; 0 before the first answer

    @property
    def links(self) -> Sequence[Link]:
        """To the servers, in their order."""
        return self._roles.links

    def start_push(self, push: Push, *, pull_from: int) -> None:
        """Send to all servers at once; those before `pull_from` answer with weights."""
        self._send_settings(push.settings)
        parts = self._flat.chunks(push.g)
        for number, (link, chunk, part) in enumerate(
            zip(self.links, self._chunks, parts, strict=True)
        ):
            codec = self._at_ratio(push.codec, number)
            data = chunk.encode(part, codec, push.step, self._roles.number, 0)
            flags = push.flags
            if number >= pull_from:
                flags &= ~(Flag.PULL | Flag.CODED)
            frame = Frame(
                kind=Kind.PUSH,
                flags=flags,
                step=push.step,
                version=self.versions[number],
                length=data.numel(),
            )
            link.start(frame, data)

    def finish_push(self, number: int) -> Frame:
        """One server's answer; its weights, if requested, are still to be taken."""
        frame = self.links[number].answer()
        self.links[number].finish()
        self.ratios[number] = frame.number
        return frame

    def _at_ratio(self, codec: Codec, server: int) -> Codec:
        """ndqsg at the ratio that a server has announced; others unchanged."""
        if codec.nested is None:
            return codec
        ratio = self.ratios[server]
        return at_ratio(codec.nested, ratio) if ratio else plain_codec(codec.nested)

    def take(
        self, number: int, frame: Frame, *, step: int, out: Tensor, before: Tensor | None = None
    ) -> None:
        """A chunk of weights that follows an answer; encoded as a delta if there is `before`."""
        chunk, link = self._chunks[number], self.links[number]
        mine = slice(chunk.first, chunk.last)
        target = out[mine]
        self.versions[number] = frame.version
        if before is None:
            self._take_plain(link, frame, target)
            return
        most = ALIGN + chunk.most_bytes(self._pull_codec)
        data = link.body(frame, self._scratch.take("coded", most, HOST, torch.uint8))
        chunk.decode(data[ALIGN:], self._pull_codec, target, step, self._whose, 1)
        factor = data[:4].view(torch.float32).to(target.device)
        apply_delta(target, factor, before[mine], out=target)

    def _take_plain(self, link: Link, frame: Frame, target: Tensor) -> None:
        """Straight into their place, if that is on the host."""
        size = 4 * target.numel()
        if frame.length != size:
            raise WireError(f"rank {link.peer} sent {frame.length} bytes of weights, not {size}")
        if target.device == HOST:
            link.body(frame, target.view(torch.uint8))
            return
        buffer = self._scratch.take("weights", size, HOST, torch.uint8)
        target.copy_(link.body(frame, buffer).view(torch.float32))

    def ask(
        self, server: int, kind: Kind, *, number: int = 0, step: int = 0, flags: Flag = Flag.NONE
    ) -> Frame:
        """A request without a body."""
        self.links[server].send(Frame(kind=kind, number=number, step=step, flags=flags))
        return self.links[server].answer()

    def read(self, step: int, out: Tensor) -> None:
        """All weights, as they are."""
        versions = list(self.versions)
        for number in range(len(self.links)):
            frame = self.ask(number, Kind.READ, step=step)
            self.take(number, frame, step=step, out=out)
        self.versions = versions  # no gradient will be of these

    def leave(self) -> None:
        """Notify all servers; nothing may be in flight."""
        for number in range(len(self.links)):
            self.ask(number, Kind.LEAVE)

    def _send_settings(self, settings: Settings) -> None:
        """Settings travel when they have changed."""
        if settings == self._sent_settings:
            return
        data = pack_settings(settings)
        for link in self.links:
            link.start(Frame(kind=Kind.SETTINGS, length=data.numel()), data)
        self._sent_settings = settings
