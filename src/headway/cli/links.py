"""Options that say how devices are joined, and what a prediction takes of their exchanges."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from headway.errors import PlanError, UsageError

if TYPE_CHECKING:
    from headway.devices import Device
    from headway.predict.communication import Links


@dataclass(frozen=True)
class LinkOptions:
    """Options that say how devices are joined [GB/s], in place of the table of devices."""

    link: Annotated[
        float | None,
        typer.Option(metavar="GB/S", min=0.001, help="Bandwidth of a device to the others of its node, one way."),
    ] = None
    network: Annotated[
        float | None,
        typer.Option(metavar="GB/S", min=0.001, help="A device's share of its node's network, one way."),
    ] = None
    per_node: Annotated[int | None, typer.Option(metavar="N", min=1, help="Devices of a node.")] = None

    def of(self, device: "Device | None") -> "Links | None":
        """Links of a device; None of this machine, or where nothing is known.

        Raises:
            UsageError: links are given, and no device.
        """
        from headway.predict.communication import Links

        if device is None:
            if self._are_given:
                raise UsageError(
                    "--link, --network and --per-node join devices of a kind, and cannot take effect without --device."
                )
            return None
        link, network = (None if rate is None else rate * 1e9 for rate in (self.link, self.network))
        return Links.of_device(device, link_bytes_per_s=link, network_bytes_per_s=network, per_node=self.per_node)

    def required(self, device: "Device") -> "Links":
        """Links of a device.

        Raises:
            PlanError: too little is given, and the table does not know the rest.
        """
        links = self.of(device)
        if links is None:
            raise PlanError(
                f"how fast {device.title} is joined to others is not known. Give --link in GB/s and --per-node, with "
                "--network for more than one node, or put link_gb_per_s, devices_per_node and network_gb_per_s into "
                "your own table ($HEADWAY_PEAKS; docs/devices.md)."
            )
        return links

    def joining(self, device: "Device | None", count: int) -> "Links | None":
        """Links of so many devices; None where the table knows too little, and exchanges are taken to hide.

        Raises:
            UsageError: links are given, and no device or only one.
            PlanError: links are given, but too little of them, or they do not reach so many devices.
        """
        links = self.of(device)
        if count == 1 and self._are_given:
            raise UsageError("--link, --network and --per-node cannot take effect on one device; give --devices.")
        if self._are_given and device is not None:
            links = self.required(device)
            links.require(count)
        return links if links is not None and count > 1 and links.reaches(count) else None

    @property
    def _are_given(self) -> bool:
        return any(value is not None for value in (self.link, self.network, self.per_node))


def note_on_links(links: "Links | None", devices: int, *, on_this_machine: bool) -> str:
    """Say what a prediction takes of the exchanges between devices; nothing of one device.

    Args:
        links: that were found.
        devices: that train together.
        on_this_machine: they are processes of this machine, whose rates were measured.
    """
    if devices == 1:
        return ""
    if links is not None:
        return f"Links: {links.source}."
    if on_this_machine:
        return "Exchanges between processes of this machine are not in the step: it will take longer."
    return (
        "Exchanges between devices are taken to hide behind computing, for their links are not known: the step above "
        "is the best case. --link, --network and --per-node give them; PCI Express x16 moves 31.5 GB/s each way (4.0), "
        "or 63 (5.0)."
    )
