"""ApiConfig: what the doors of a node share."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.config.node import LimitsConfig, ServerConfig
from penstock.doors.access.keys import Keys
from penstock.doors.access.usage_log import UsageLog
from penstock.doors.generation.catalog import ModelCatalog
from penstock.doors.generation.served_model import ServedModel


@dataclass(frozen=True, slots=True)
class ApiConfig:
    catalog: ModelCatalog[ServedModel]
    server: ServerConfig = field(default_factory=ServerConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    keys: Keys = field(default_factory=lambda: Keys(None, None))
    usage: UsageLog = field(default_factory=UsageLog)
