"""What a sandbox's `network` object says of the traffic to its ports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

TOKEN_HEADER = b"e2b-traffic-access-token"


@dataclass(frozen=True, slots=True)
class Ingress:
    """`public`: a port needs no traffic token; `mask`: the Host header programs see, with `${PORT}` for
    the port; `https_ports`: what listens there speaks TLS."""

    public: bool
    mask: str | None
    https_ports: frozenset[int]

    @classmethod
    def of(cls, network: Mapping[str, Any]) -> Ingress:
        return cls(
            public=network.get("allowPublicTraffic") is not False,
            mask=network.get("maskRequestHost") or None,
            https_ports=frozenset(network.get("httpsPorts") or ()),
        )

    def host(self, port: int) -> bytes | None:
        """What stands in for the Host header of a request to `port`, if anything does."""
        return self.mask.replace("${PORT}", str(port)).encode() if self.mask is not None else None
