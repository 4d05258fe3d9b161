"""Checks that several tables of settings share."""

from __future__ import annotations

import math
import re

from penstock.config.kinds import format_value
from penstock.errors import ConfigError


def unusable(name: str, value: object, hint: str) -> ConfigError:
    return ConfigError(f"{name} = {format_value(value)} cannot be used.", hint=hint)


def check_device(device: str) -> None:
    if not re.fullmatch(r"auto|cpu|mps|cuda|cuda:\d+(,cuda:\d+)*", device):
        raise unusable("device", device, "Use auto, cpu, cuda, cuda:1, cuda:0,cuda:1 or mps.")


def check_whole(name: str, value: object, *, minimum: int) -> None:
    if type(value) is not int or value < minimum:
        raise unusable(name, value, f"Give a whole number from {minimum} up.")


def check_seconds(name: str, value: float, *, allow_zero: bool = False) -> None:
    if type(value) not in (int, float) or not math.isfinite(value) or value < 0 or (value == 0 and not allow_zero):
        raise unusable(name, value, f"Give a number of seconds {'from 0 up' if allow_zero else 'above 0'}.")


def is_address(host: str) -> bool:
    import ipaddress  # at the top it would cost every `--help` some milliseconds

    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
