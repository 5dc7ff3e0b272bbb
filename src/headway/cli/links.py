"""Options that say how devices are joined, and what a prediction takes of their exchanges."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from headway.errors import UsageError

if TYPE_CHECKING:
    from headway.devices import Device
    from headway.predict.communication import Links


@dataclass(frozen=True)
class LinkOptions:
    """Options that say how devices are joined [GB/s], in place of the table of devices."""

    link: Annotated[
        float | None,
        typer.Option(metavar="GB/S", min=0.001, help="Bandwidth from a device to other devices of its node, one way."),
    ] = None
    network: Annotated[
        float | None,
        typer.Option(metavar="GB/S", min=0.001, help="A device's share of the network of its node, one way."),
    ] = None
    per_node: Annotated[int | None, typer.Option(metavar="N", min=1, help="Devices of a node.")] = None

    def of(self, device: "Device | None") -> "Links | None":
        """Links of a device; None of this machine.

        Raises:
            UsageError: links are given, and no device.
        """
        from headway.predict.communication import Links

        if device is None:
            if self._are_given:
                raise UsageError(
                    "--link, --network and --per-node describe links between devices, so they need --device."
                )
            return None
        link, network = (None if rate is None else rate * 1e9 for rate in (self.link, self.network))
        return Links.of_device(device, link_bytes_per_s=link, network_bytes_per_s=network, per_node=self.per_node)

    def joining(self, device: "Device | None", count: int) -> "Links | None":
        """Links of so many devices; None of one, and of processes of this machine.

        Raises:
            UsageError: links are given, and no device or only one.
        """
        links = self.of(device)
        if count == 1 and self._are_given:
            raise UsageError("--link, --network and --per-node cannot take effect on one device. Give --devices.")
        return links if count > 1 else None

    @property
    def _are_given(self) -> bool:
        return any(value is not None for value in (self.link, self.network, self.per_node))


def note_on_links(links: "Links | None", devices: int) -> str:
    """Say what a prediction takes of the exchanges between devices; nothing of one device.

    Args:
        links: between them; None of processes of this machine, whose rates were measured.
        devices: that train together.
    """
    if devices == 1:
        return ""
    if links is None:
        return "The step does not contain exchanges between processes of this machine, so it will take longer."
    return f"Links: {links.source}."
