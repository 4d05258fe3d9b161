"""The request bodies of files and batches."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from penstock.domain.duration import DAY, HOUR, PATTERN
from penstock.doors.http.fields import Fields
from penstock.doors.openai.job_operations import OPENAI_JOBS
from penstock.doors.openai.requests import check_metadata
from penstock.errors import RequestError
from penstock.workspace.batch.batches import parse_window


class ExpiresAfter(Fields):
    anchor: Literal["created_at"]
    seconds: int = Field(ge=HOUR, le=30 * DAY)


class FileFields(Fields):
    """The form without its file."""

    purpose: Literal["batch"]
    expires_after: ExpiresAfter | None = None


class FileUpload(Fields):
    """The whole form, for the API description. Forms write an object as `expires_after[seconds]`."""

    file: bytes
    purpose: Literal["batch"]
    anchor: Literal["created_at"] | None = Field(default=None, alias="expires_after[anchor]")
    seconds: int | None = Field(default=None, alias="expires_after[seconds]", ge=HOUR, le=30 * DAY)


class BatchCreation(Fields):
    REFUSED: ClassVar = {"model": "Each line has its own."}

    input_file_id: str
    endpoint: str = Field(json_schema_extra={"enum": [*OPENAI_JOBS.endpoints]})
    completion_window: str = Field(json_schema_extra={"pattern": f"^{PATTERN}$"})
    metadata: dict[str, str] | None = None
    output_expires_after: ExpiresAfter | None = None

    def check(self) -> None:
        if self.endpoint not in OPENAI_JOBS.endpoints:
            raise RequestError(
                f"endpoint = '{self.endpoint[:80]}' cannot be a batch.",
                field="endpoint",
                hint=f"These can: {', '.join(OPENAI_JOBS.endpoints)}.",
            )
        check_metadata(self.metadata)

    @property
    def window(self) -> float:
        """The completion window in seconds."""
        return parse_window(self.completion_window)
