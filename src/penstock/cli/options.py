"""Options that several commands share, and how their text is parsed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Literal

import typer

from penstock.config.checks import check_device
from penstock.config.node import DEFAULT_MODEL as DEFAULT_MODEL
from penstock.domain.topology import LayerRange
from penstock.errors import ConfigError, RequestError

FLAGS = {"tags": "--tag"}  # request fields whose option has another name

ModelOption = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        metavar="MODEL",
        help="A name from `penstock models list`, a folder, a .gguf file or a hub id (org/name).",
    ),
]
OptionalModel = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        metavar="MODEL",
        help="A name from `penstock models list`, a folder, a .gguf file or a hub id (org/name); by default the server's first "
        f"model, or {DEFAULT_MODEL}.",
    ),
]
DtypeOption = Annotated[
    Literal["auto", "bfloat16", "float32"],
    typer.Option("--dtype", help="Number format that PyTorch computes in; auto takes the fastest for this machine."),
]
QuantOption = Annotated[
    Literal["none", "fp8", "int8", "int4"],
    typer.Option("--quant", help="What 16- and 32-bit weights are rounded to when they are loaded; fp8 needs a CUDA GPU."),
]


def parse_device(device: str) -> str:
    with wrong_usage("--device"):
        check_device(device)
    return device


DeviceOption = Annotated[
    str,
    typer.Option(
        "--device",
        metavar="DEVICE",
        callback=parse_device,
        help="Where to compute: auto, cpu, cuda (all cards), cuda:1, cuda:0,cuda:1 or mps; auto takes a GPU if there is one.",
    ),
]
SegmentsOption = Annotated[
    str | None,
    typer.Option(
        "--segments",
        metavar="RANGES",
        help='Split the model into layer ranges, such as "0:10,10:30", as if they were on several machines.',
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text for people.")]


def parse_segments(text: str | None) -> list[tuple[int, int]] | None:
    """Parse `"0:10,10:30"`. Whether the ranges cover the model is known only once it is loaded."""
    if text is None:
        return None
    with wrong_usage("--segments"):
        return [(found.start, found.end) for found in map(LayerRange.parse, text.split(","))]


@contextmanager
def wrong_usage(option: str = "") -> Iterator[None]:
    """Report an invalid value as wrong usage (exit code 64), with the name of the option."""
    try:
        yield
    except ConfigError as error:
        raise typer.BadParameter(str(error), param_hint=option or None) from None
    except RequestError as error:
        flag = FLAGS.get(error.field, f"--{error.field.replace('_', '-')}")
        raise typer.BadParameter(str(error), param_hint=option or (flag if error.field else None)) from None
