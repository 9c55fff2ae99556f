"""What a device's own sensors say, by the kernel's hwmon folders below it."""

from __future__ import annotations

from fasttrain.hardware.host import Host


def read_sensor(host: Host, device: str, name: str) -> int | None:
    """Give a sensor's number as the kernel writes it; None where no hwmon of the device has it.

    Args:
        host: The machine.
        device: The device's folder in sysfs.
        name: The file, such as ``power1_max`` (microwatts) or ``temp1_input`` (millidegrees).
    """
    folders = host.numbered(f"{device}/hwmon", r"hwmon(\d+)")
    found = (host.number(f"{folder}/{name}") for folder in folders)
    return next((number for number in found if number is not None), None)


def temperature_c(host: Host, device: str, name: str) -> float | None:
    """Give a temperature in degrees Celsius.

    Source: Linux 6.12, Documentation/hwmon/sysfs-interface.rst: millidegree Celsius.
    """
    millidegrees = read_sensor(host, device, name)
    return None if millidegrees is None else millidegrees / 1000
