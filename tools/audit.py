"""Look up known vulnerabilities of all pinned packages with pip-audit, and never mistake silence for an answer.

pip-audit exits with 0 when its database does not know a package, or when a proxy answers in the database's place. Here that is a
separate error: 0 means that every package was looked up and none has a known vulnerability, 1 that some have, 2 unknown.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILES = (
    "requirements/pip.txt",
    "requirements/dev.txt",
    "requirements/torch.txt",
    "requirements/supply.txt",
    "requirements/docs.txt",
    "requirements/triton.txt",
)
# Vulnerabilities without a fixed version, and why they do not matter here. Remove them once there is one.
ACCEPTED = {
    "CVE-2026-69112": "accelerate is for tests only, and none of them loads a sharded checkpoint with it",
}
CLEAN, HOLES, UNKNOWN = 0, 1, 2
ELSEWHERE = "Run it where https://pypi.org/pypi can be reached; mirrors of packages do not have the database."


def verdict(report: str, messages: str) -> tuple[int, str]:
    """Return the exit code and a message, from pip-audit's JSON and its stderr."""
    try:
        packages = json.loads(report)["dependencies"]
    except (ValueError, KeyError, TypeError):
        why = messages.strip().splitlines()[-1:] or ["it said nothing"]
        return UNKNOWN, f"Nothing was audited: pip-audit failed ({why[0]}). {ELSEWHERE}"
    found = [(package, hole) for package in packages for hole in package.get("vulns", [])]
    accepted = [(package, hole) for package, hole in found if ACCEPTED.keys() & {hole["id"], *hole.get("aliases", [])}]
    holes = [
        f"{package['name']} {package['version']}: {hole['id']}, fixed in {', '.join(hole['fix_versions']) or 'no version yet'}"
        for package, hole in found
        if (package, hole) not in accepted
    ]
    skipped = [package["name"] for package in packages if "skip_reason" in package]
    if len(skipped) == len(packages):
        return UNKNOWN, f"Nothing was audited: the database knows none of the {len(packages)} packages. {ELSEWHERE}"
    unknown = f"{len(skipped)} of {len(packages)} packages were not found in the database, so nothing is known about them"
    if holes:
        return HOLES, "\n".join([*holes, *([f"{unknown}."] if skipped else [])])
    if skipped:
        return UNKNOWN, f"{unknown}: {', '.join(skipped[:5])}{' ...' if len(skipped) > 5 else ''}."
    known = f", but for {len(accepted)} that tools/audit.py accepts" if accepted else ""
    return CLEAN, f"No known holes in {len(packages)} packages{known}."


def audit(file: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "pip_audit", "--disable-pip", "--no-deps", "--progress-spinner", "off", "--format", "json"]
    done = subprocess.run([*command, "--requirement", str(ROOT / file)], capture_output=True, text=True, check=False)
    return verdict(done.stdout, done.stderr)


def main() -> int:
    codes = []
    for file in FILES:
        code, message = audit(file)
        codes.append(code)
        print(f"{file}: {message}")
    return HOLES if HOLES in codes else max(codes)


if __name__ == "__main__":
    sys.exit(main())
