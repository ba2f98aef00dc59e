"""Keep a site of several versions: ``python docs/versions.py SITE NAME BUILT`` makes the built site its folder NAME.

``latest`` is the site of the main branch, ``v1.2.3`` that of a release. Every folder is a whole site that needs no
other. It gets a ``_static/versions.js`` that names them all, from which the switcher in the sidebar is made. Nothing is
fetched, so that it works from a disk too. The front page leads to the newest release, or to ``latest`` before there is
one.
"""

import json
import re
import shutil
import sys
from pathlib import Path

LATEST = "latest"
RELEASE = re.compile(r"v\d+(\.\d+)*")
FRONT = """<!doctype html>
<meta charset="utf-8">
<title>topk_registry</title>
<meta http-equiv="refresh" content="0; url={name}/index.html">
<p><a href="{name}/index.html">topk_registry {name}</a></p>
"""


def put(site: Path, name: str, built: Path) -> None:
    """Make a built site the version ``name`` of a site, in place of what it was."""
    if name != LATEST and not RELEASE.fullmatch(name):
        raise ValueError(f"a version is {LATEST} or like v1.2.3, got {name!r}")
    if not (built / "index.html").is_file() or not (built / "_static" / "versions.js").is_file():
        raise ValueError(f"{built} holds no built site: expected index.html and _static/versions.js in it")
    site.mkdir(parents=True, exist_ok=True)
    half = site / f".{name}.new"
    shutil.rmtree(half, ignore_errors=True)  # of a run that was stopped
    shutil.copytree(built, half, ignore=shutil.ignore_patterns(".doctrees", ".buildinfo"))
    shutil.rmtree(site / name, ignore_errors=True)
    half.rename(site / name)
    tell(site)


def tell(site: Path) -> None:
    """Name all versions to each, and write the front page."""
    names = versions(site)
    listed = [{"name": name, "pages": pages(site / name)} for name in names]
    for name in names:
        (site / name / "_static" / "versions.js").write_text(f"window.SITE_VERSIONS = {json.dumps(listed)};\n")
    newest = next((name for name in names if name != LATEST), names[0])
    (site / "index.html").write_text(FRONT.format(name=newest))
    (site / ".nojekyll").touch()  # GitHub Pages leaves out folders with an underscore otherwise


def versions(site: Path) -> list[str]:
    """Names of the versions, ``latest`` first and then the newest release."""
    found = [path.name for path in site.iterdir() if (path / "_static" / "versions.js").is_file()]
    releases = sorted(filter(RELEASE.fullmatch, found), key=numbers, reverse=True)
    return [LATEST] * (LATEST in found) + releases


def numbers(name: str) -> list[int]:
    return [int(part) for part in name[1:].split(".")]


def pages(version: Path) -> list[str]:
    """Pages of a version, as paths within it."""
    return sorted(path.relative_to(version).as_posix() for path in version.rglob("*.html"))


def main(words: list[str]) -> int:
    if len(words) != 3:
        print(__doc__.splitlines()[0], file=sys.stderr)
        return 2
    try:
        put(Path(words[0]), words[1], Path(words[2]))
    except (OSError, ValueError) as error:
        print(f"versions.py: {error}", file=sys.stderr)
        return 1
    print("\n".join(versions(Path(words[0]))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
