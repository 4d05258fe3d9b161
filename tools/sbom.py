"""Write the SBOM of Penstock (CycloneDX): its runtime packages, in the versions it is tested with.

The wheel contains it (PEP 770), so it has neither a timestamp nor a random number: the same pins make the same file.
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FILE = ROOT / "requirements/penstock.cdx.json"
PIN = re.compile(r"^([A-Za-z0-9][\w.-]*)==([^\s;]+)")
VIA = re.compile(r"^    # +(?:via )?([\w.-]+)(?: \(pyproject\.toml\))?$")


def pins(text: str) -> dict[str, str]:
    """The versions of a requirements file, by name."""
    return {found[1]: found[2] for line in text.splitlines() if (found := PIN.match(line))}


def requirers(text: str) -> dict[str, list[str]]:
    """The packages that each package is needed by, as the comments of a compiled requirements file say."""
    needed: dict[str, list[str]] = {}
    name = ""
    for line in text.splitlines():
        if found := PIN.match(line):
            name = found[1]
            needed[name] = []
        elif name and (found := VIA.match(line)) and found[1] != "via":
            needed[name].append(found[1])
    return needed


def sbom(runtime: str, torch: str, project: dict[str, Any], version: str) -> dict[str, Any]:
    """The document, from the texts of runtime.txt and torch.txt and the project's table of pyproject.toml."""
    name = project["name"]
    needed = {**requirers(runtime), **{package: [name] for package in pins(torch)}}
    refs = {package: f"pkg:pypi/{package}@{pin}" for package, pin in {**pins(runtime), **pins(torch)}.items()}
    root = f"pkg:pypi/{name}@{version}"
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "component": {
                "type": "library",
                "bom-ref": root,
                "name": name,
                "version": version,
                "description": project["description"],
                "licenses": [{"license": {"id": project["license"]}}],
                "purl": root,
            }
        },
        "components": [
            {"type": "library", "bom-ref": ref, "name": package, "version": ref.rpartition("@")[2], "purl": ref}
            for package, ref in sorted(refs.items())
        ],
        "dependencies": [
            {"ref": ref, "dependsOn": sorted(refs[other] for other in needed if package in needed[other])}
            for package, ref in [(name, root), *sorted(refs.items())]
        ],
    }


def render(root: Path = ROOT) -> str:
    read = {file: (root / file).read_text(encoding="utf-8") for file in ("requirements/runtime.txt", "requirements/torch.txt")}
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    version = re.search(r'^__version__ = "(.+)"$', (root / "src/penstock/__init__.py").read_text(encoding="utf-8"), re.M)
    assert version is not None
    return json.dumps(sbom(*read.values(), project, version[1]), indent=2) + "\n"


def main() -> None:
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    text = render()
    if (error := JsonStrictValidator(SchemaVersion.V1_6).validate_str(text)) is not None:
        sys.exit(f"The SBOM is not valid CycloneDX: {error}")
    FILE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
