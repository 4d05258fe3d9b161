"""WorkRequest: the contents of request.json, which is everything about a job but its prompt. Checked on construction."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from penstock.domain.sampling import SamplingParams
from penstock.errors import BadJob, RequestError
from penstock.workspace.store.files import MAX_NUMBER, MAX_PROMPT_BYTES, MAX_RECORD_BYTES, PROMPT, REQUEST, read_file
from penstock.workspace.store.job_id import is_job_id, order

MIN_PRIORITY, MAX_PRIORITY = -10, 10  # interactive requests have 0 by default
DEFAULT_PRIORITY = -5
MAX_TAGS, MAX_NAME_CHARS = 32, 200
MAX_PARENTS = 64
NAME_PATTERN = r"[\w-]+"  # of a parent, as prompts write it in {{braces}}

NOT_IN_DIGEST = ("key", "retry_of", "submitted", "owner")  # may differ between two submissions of the same request
OUTPUT_FORMATS = ("schema", "grammar", "regex")
UNSUPPORTED_SAMPLING = ("n", "logprobs", "prompt_logprobs")  # a job's result is a single text
SAMPLING_FIELDS = tuple(f.name for f in dataclasses.fields(SamplingParams) if f.name not in UNSUPPORTED_SAMPLING)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkRequest:
    """What a job asks for.

    endpoint: an API path; then the prompt is the body of a request to it, and the result the body of the answer.
    raw: continue the prompt as plain text, without the chat template.
    sampling: only explicit values; the model's recommended ones fill the rest.
    deadline: seconds after `submitted` (Unix time); orders the queue.
    after: parent jobs, by the names that the prompt has for their results.
    batch: the batch that this job is a line of.
    owner: identifies the API key of that batch; None is the operator."""

    model: str | None = None
    endpoint: str | None = None
    system: str | None = None
    raw: bool = False
    sampling: Mapping[str, Any] = field(default_factory=dict)
    schema: Any = None
    grammar: str | None = None
    regex: str | None = None
    priority: int = DEFAULT_PRIORITY
    deadline: float | None = None
    tags: tuple[str, ...] = ()
    after: Mapping[str, str] = field(default_factory=dict)
    key: str | None = None
    retry_of: str | None = None
    batch: str | None = None
    owner: str | None = None
    submitted: float = 0.0

    def __post_init__(self) -> None:
        for name in ("model", "endpoint", "system", "grammar", "regex", "key", "owner"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise _invalid(name, value, "non-empty text")
        for name in ("model", "endpoint", "key", "owner"):
            if len(getattr(self, name) or "") > MAX_NAME_CHARS:
                raise _invalid(name, getattr(self, name), f"at most {MAX_NAME_CHARS} characters")
        if type(self.raw) is not bool:
            raise _invalid("raw", self.raw, "true or false")
        if self.raw and self.system is not None:
            raise RequestError("A system message needs the chat template, which raw leaves out.", field="system")
        if type(self.priority) is not int or not MIN_PRIORITY <= self.priority <= MAX_PRIORITY:
            raise _invalid("priority", self.priority, f"a whole number from {MIN_PRIORITY} to {MAX_PRIORITY}")
        for name in ("deadline", "submitted"):
            value = getattr(self, name)
            if value is None and name == "deadline":
                continue
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not 0 <= value < MAX_NUMBER or (name == "deadline" and value == 0):
                raise _invalid(name, value, "seconds above 0")
        tags = self.tags
        if not isinstance(tags, list | tuple) or len(tags) > MAX_TAGS or not all(map(_is_tag, tags)):
            raise _invalid("tags", tags, f"up to {MAX_TAGS} words of at most {MAX_NAME_CHARS} characters")
        object.__setattr__(self, "tags", tuple(tags))
        for name, what in (("retry_of", "a job"), ("batch", "a batch")):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, str) and is_job_id(value)):
                raise _invalid(name, value, f"the id of {what}")
        self._check_endpoint()
        self._check_after()
        self._check_sampling()
        formats = [name for name in OUTPUT_FORMATS if getattr(self, name) is not None]
        if len(formats) > 1:
            raise RequestError(f"{' and '.join(formats)} contradict each other.", field=formats[1], hint="Give one of them.")
        if formats and (self.sampling.get("ignore_eos") or self.sampling.get("min_tokens")):
            name = "ignore_eos" if self.sampling.get("ignore_eos") else "min_tokens"
            raise RequestError(f"{name} and a {formats[0]} contradict each other: it says when the text ends.", field=name)
        self._check_size()

    def _check_endpoint(self) -> None:
        """Refuse fields that the body of an API request has too."""
        if self.endpoint is None:
            return
        for name in ("system", "raw", "sampling", "after", *OUTPUT_FORMATS):
            if getattr(self, name) != _DEFAULTS[name]:
                raise RequestError(f"A job with an endpoint takes no {name}: write it in the body.", field=name)

    def _check_after(self) -> None:
        if not isinstance(self.after, Mapping) or len(self.after) > MAX_PARENTS:
            raise _invalid("after", self.after, f"up to {MAX_PARENTS} names, each with the id of a job")
        for name, job_id in self.after.items():
            if not isinstance(name, str) or len(name) > MAX_NAME_CHARS or not re.fullmatch(NAME_PATTERN, name):
                raise _invalid("after", name, "names of letters, digits, _ and -")
            if not isinstance(job_id, str) or not is_job_id(job_id):
                raise _invalid("after", job_id, "the id of a job, as `penstock work` prints it")
            if is_job_id(name) and name != job_id:
                raise RequestError(f"{name} is a job id, and cannot be the name of {job_id}.", field="after")
        object.__setattr__(self, "after", dict(self.after))

    def _check_sampling(self) -> None:
        if not isinstance(self.sampling, Mapping):
            raise _invalid("sampling", self.sampling, "an object with names and values")
        for name in self.sampling:
            if name in UNSUPPORTED_SAMPLING:
                raise RequestError(f"A job takes no {name}: its result is a single text.", field=name, hint="Leave it out.")
            if name not in SAMPLING_FIELDS:
                raise _unknown_field(f"sampling.{name}", name, SAMPLING_FIELDS)
        SamplingParams(**self.sampling)

    def _check_size(self) -> None:
        try:
            size = len(self.to_json())
        except UnicodeEncodeError:
            raise RequestError("The request contains invalid Unicode.", hint="Remove lone surrogates.") from None
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(f"The request cannot be written as JSON: {error}.") from None
        if size > MAX_RECORD_BYTES:
            raise RequestError(f"The request has {size} bytes without its prompt; the limit is {MAX_RECORD_BYTES}.")

    def to_json(self) -> bytes:
        """The contents of request.json: only what differs from the defaults."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        changed = {name: value for name, value in values.items() if value != _DEFAULTS[name]}
        return json.dumps(changed, ensure_ascii=False, indent=1, default=_plain).encode() + b"\n"

    def digest(self, prompt: bytes) -> str:
        """Hash what is asked. Two requests with the same key must have the same digest."""
        content = {f.name: _normalized(getattr(self, f.name)) for f in dataclasses.fields(self) if f.name not in NOT_IN_DIGEST}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode() + b"\0" + prompt).hexdigest()

    def with_submit_time(self, job_id: str) -> WorkRequest:
        """Take a missing time from the job's id: requests made by hand have none."""
        return self if self.submitted else dataclasses.replace(self, submitted=min(float(order(job_id)[0]), MAX_NUMBER - 1))


_DEFAULTS: Mapping[str, Any] = {
    f.name: f.default if f.default_factory is dataclasses.MISSING else f.default_factory()
    for f in dataclasses.fields(WorkRequest)
}


def parse_request(data: bytes) -> WorkRequest:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BadJob(f"{REQUEST} is not JSON: {error}.") from None
    if not isinstance(found, dict):
        raise BadJob(f"{REQUEST} is not a JSON object.")
    for name in found:
        if name not in _DEFAULTS:
            raise _unknown_field(name, name, _DEFAULTS)
    return WorkRequest(**found)


def read_request(folder: int) -> WorkRequest:
    return parse_request(read_file(folder, REQUEST, MAX_RECORD_BYTES) or b"{}")


def read_job(folder: int) -> tuple[WorkRequest, str]:
    """Read the request and the prompt of a job. Raises BadJob or RequestError if they cannot be used."""
    request = read_request(folder)
    prompt = read_file(folder, PROMPT, MAX_PROMPT_BYTES)
    if prompt is None:
        raise BadJob(f"There is no {PROMPT}.", hint="It holds the prompt as UTF-8 text.")
    try:
        text = prompt.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadJob(f"{PROMPT} is not UTF-8 text ({error.reason} at byte {error.start}).") from None
    if not text:
        raise BadJob(f"{PROMPT} is empty.", hint="Write a prompt into it.")
    return request, text


def _normalized(value: Any) -> Any:
    """Make equal values compare equal as JSON: 1 and 1.0 ask for the same."""
    if isinstance(value, Mapping):
        return {str(name): _normalized(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_normalized(inner) for inner in value]
    return float(value) if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 53 else value


def _is_tag(tag: object) -> bool:
    return isinstance(tag, str) and 0 < len(tag) <= MAX_NAME_CHARS and tag.isprintable()


def _plain(value: object) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError


def _invalid(name: str, value: object, expected: str) -> RequestError:
    return RequestError(f"{name} = {str(value)[:200]!r} cannot be used.", field=name, hint=f"Give {expected}.")


def _unknown_field(field_name: str, name: object, known: Any) -> RequestError:
    near = get_close_matches(str(name)[:80], list(known), n=1)
    if name in SAMPLING_FIELDS and known is not SAMPLING_FIELDS:
        return RequestError(f"{name} is in the wrong place.", field=str(name), hint=f'Write "sampling": {{"{name}": ...}}.')
    hint = f"Did you mean {near[0]}?" if near else "Remove it."
    label = str(field_name)[:80].encode("utf-8", "replace").decode()
    return RequestError(f"{label} is not a known parameter.", field=label, hint=hint)
