"""What is installed is what was reviewed: pins, hashes, the SBOM, and an audit that never mistakes silence for an answer."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from tools import audit
from tools.sbom import FILE, pins, render, requirers

ROOT = Path(__file__).parents[1]
CONSOLE = ROOT / "src/penstock/doors/app/console/static"
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
RUNTIME = [Requirement(text) for text in PYPROJECT["project"]["dependencies"]]
DEV = [Requirement(text) for text in PYPROJECT["project"]["optional-dependencies"]["dev"]]
SUPPLY, PIP, DOCS, TRITON = (
    [Requirement(text) for text in PYPROJECT["dependency-groups"][name]] for name in ("supply", "installer", "docs", "triton")
)
BUILD = [Requirement(text) for text in PYPROJECT["build-system"]["requires"] + PYPROJECT["dependency-groups"]["build"]]
HASH = re.compile(r"--hash=sha256:[0-9a-f]{64}")
# The first versions without the vulnerabilities known when a floor was set. A floor may rise above these, never fall below.
MENDED = {
    "aiohttp": "3.14.3",
    "cryptography": "50",
    "httptools": "0.7",
    "jinja2": "3.1.6",
    "langchain-openai": "1.1.14",
    "pytest": "9.0.3",
    "python-multipart": "0.0.31",
    "starlette": "1.3.1",
    "torch": "2.12.1",
    "transformers": "5.10",
}


def text(name: str) -> str:
    return (ROOT / "requirements" / name).read_text(encoding="utf-8")


def hashes(name: str) -> dict[str, set[str]]:
    """By package, all hashes of its files."""
    blocks = re.split(r"^(?=[A-Za-z0-9])", text(name), flags=re.M)
    return {block.partition("==")[0]: set(HASH.findall(block)) for block in blocks if not block.startswith("#")}


TORCH = pins(text("torch.txt"))


@pytest.mark.parametrize(
    "name, wanted",
    [
        ("runtime.txt", RUNTIME),
        ("dev.txt", RUNTIME + DEV + BUILD),
        ("build.txt", BUILD),
        ("supply.txt", SUPPLY),
        ("pip.txt", PIP),
        ("docs.txt", DOCS),
        ("triton.txt", TRITON),
    ],
    ids=["runtime", "dev", "build", "supply", "pip", "docs", "triton"],
)
def test_every_dependency_is_pinned_to_a_version_that_pyproject_allows(name: str, wanted: list[Requirement]) -> None:
    pinned = {**pins(text(name)), **TORCH}
    for requirement in wanted:
        version = pinned[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), f"{requirement}, but {name} has {version}"


@pytest.mark.parametrize("name", ["runtime.txt", "dev.txt", "build.txt", "supply.txt", "pip.txt", "docs.txt", "triton.txt"])
def test_every_pin_has_the_hashes_of_its_files(name: str) -> None:
    found = hashes(name)
    assert found.keys() == pins(text(name)).keys()
    assert [package for package, values in found.items() if not values] == []


def test_hashes_are_those_of_all_systems_and_not_only_of_this_one() -> None:
    """Binary packages have a file for each Python and system; only a few hashes would be those of one machine."""
    found = hashes("runtime.txt")
    assert all(len(found[package]) >= 10 for package in ("httptools", "msgspec", "numpy", "uvloop"))


def test_the_files_agree() -> None:
    runtime, dev = hashes("runtime.txt"), hashes("dev.txt")
    assert pins(text("runtime.txt")).items() <= pins(text("dev.txt")).items()
    assert pins(text("build.txt")).items() <= pins(text("dev.txt")).items()
    assert all(dev[package] == values for package, values in (runtime | hashes("build.txt")).items())
    assert pins(text("dev.txt")).get("pip", pins(text("pip.txt"))["pip"]) == pins(text("pip.txt"))["pip"]


def test_torch_is_pinned_alone_and_what_it_needs_has_hashes() -> None:
    (stated,) = (entry for entry in PYPROJECT["tool"]["uv"]["dependency-metadata"] if entry["name"] == "torch")
    assert {"torch": stated["version"]} == TORCH
    assert "torch" not in pins(text("dev.txt"))
    assert {Requirement(needed).name for needed in stated["requires-dist"]} <= pins(text("runtime.txt")).keys()


def test_floors_are_above_known_holes() -> None:
    floors = {requirement.name: requirement.specifier for requirement in RUNTIME + DEV}
    for package, version in MENDED.items():
        (floor,) = (part.version for part in floors[package] if part.operator == ">=")
        assert Version(floor) >= Version(version), f"{package}{floors[package]}: versions before {version} have known holes"


# ---- the SBOM ----


def test_the_sbom_is_that_of_the_pins() -> None:
    assert FILE.read_text(encoding="utf-8") == render(), "run: make lock"


def test_the_sbom_has_every_package_and_says_what_needs_what() -> None:
    document = json.loads(render())
    components = {component["name"]: component["version"] for component in document["components"]}
    assert components == {**pins(text("runtime.txt")), **TORCH}
    needs = {entry["ref"]: entry["dependsOn"] for entry in document["dependencies"]}
    root = document["metadata"]["component"]["bom-ref"]
    assert {re.split("[/@]", ref)[1] for ref in needs[root]} == {canonicalize_name(requirement.name) for requirement in RUNTIME}
    reached, left = {root}, [root]
    while left:
        new = set(needs[left.pop()]) - reached
        reached |= new
        left += new
    assert reached == needs.keys()


def test_the_comments_of_a_compiled_file_say_what_needs_a_package() -> None:
    first = "a==1 \\\n    --hash=sha256:00\n    # via b\n"
    second = "b==2\n    # via\n    #   -c x.txt\n    #   a\n    #   penstock (pyproject.toml)\n"
    assert requirers(first + second) == {"a": ["b"], "b": ["a", "penstock"]}


@pytest.mark.slow
def test_the_wheel_carries_the_sbom_and_the_console(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("penstock-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if ".dist-info/sboms/" in name)
        assert name.endswith("/sboms/penstock.cdx.json")
        assert archive.read(name).decode() == render()
        console = {path.relative_to(ROOT / "src").as_posix() for path in CONSOLE.rglob("*") if path.is_file()}
        assert console <= {*archive.namelist()}


# ---- the audit ----


def report(*packages: dict[str, object]) -> str:
    return json.dumps({"dependencies": packages, "fixes": []})


CLEAN = {"name": "idna", "version": "3.20", "vulns": []}
HOLE = {
    "name": "idna",
    "version": "3.6",
    "vulns": [{"id": "PYSEC-2024-60", "fix_versions": ["3.7"], "aliases": [], "description": ""}],
}
NO_FIX = {
    "name": "accelerate",
    "version": "1.15.0",
    "vulns": [{"id": "PYSEC-1", "aliases": ["CVE-2026-69112"], "fix_versions": []}],
}
SKIPPED = {"name": "idna", "skip_reason": "Dependency not found on PyPI and could not be audited: idna (3.20)"}


@pytest.mark.parametrize(
    "output, errors, code, words",
    [
        (report(CLEAN), "", audit.CLEAN, "No known holes in 1 packages."),
        (report(CLEAN, NO_FIX), "", audit.CLEAN, "No known holes in 2 packages, but for 1 that tools/audit.py accepts."),
        (report(NO_FIX, HOLE), "", audit.HOLES, "idna 3.6"),
        (report(CLEAN, HOLE), "", audit.HOLES, "idna 3.6: PYSEC-2024-60, fixed in 3.7"),
        (report(SKIPPED, HOLE), "", audit.HOLES, "1 of 2 packages were not found"),
        (report(CLEAN, SKIPPED), "", audit.UNKNOWN, "1 of 2 packages were not found in the database"),
        (
            report(SKIPPED, SKIPPED),
            "",
            audit.UNKNOWN,
            "none of the 2 packages. Run it where https://pypi.org",
        ),
        (report(), "", audit.UNKNOWN, "none of the 0 packages"),
        (
            "",
            "Traceback\nConnectionError: pypi.org",
            audit.UNKNOWN,
            "Nothing was audited: pip-audit failed",
        ),
        ("[]", "", audit.UNKNOWN, "it said nothing"),
        ("<html>", "", audit.UNKNOWN, "Nothing was audited"),
    ],
)
def test_only_a_package_that_was_looked_up_counts_as_clean(output: str, errors: str, code: int, words: str) -> None:
    found, message = audit.verdict(output, errors)
    assert found == code
    assert words in message


def test_one_file_that_could_not_be_looked_up_is_enough_to_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    for codes, expected in [((0,) * 6, 0), ((0, 2, 0, 0, 0, 0), 2), ((2, 1, 0, 0, 0, 0), 1)]:
        answers = iter(codes)
        monkeypatch.setattr(audit, "audit", lambda file, answers=answers: (next(answers), file))
        assert audit.main() == expected
