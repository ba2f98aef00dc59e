"""A page that lists the routes of the service. It loads nothing, so that it works without a network."""

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

_STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1.25rem; }
h2 { font-size: 1.1rem; margin: 2rem 0 .25rem; } code, pre { font-family: ui-monospace, monospace; font-size: .9rem; }
table { border-collapse: collapse; } th, td { text-align: left; padding: .15rem 1rem .15rem 0; vertical-align: top; }
pre { overflow-x: auto; }
"""


def describe(schema: Mapping[str, Any]) -> str:
    """Return an OpenAPI schema as one HTML page."""
    title, about = (escape(schema["info"][key]) for key in ("title", "description"))
    routes = "".join(_routes(schema["paths"]))
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}: API</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"<style>{_STYLE}</style></head><body><h1>{title}</h1><p>{about}</p>"
        f'<p>The same for programs: <a href="openapi.json">openapi.json</a>.</p>'
        f"<pre>curl -T image.jpg -X POST -H 'Content-Type: image/jpeg' 'http://HOST/predict?softmax_mass=0.9'</pre>"
        f"{routes}</body></html>"
    )


def _routes(paths: Mapping[str, Any]) -> Iterator[str]:
    for path, methods in paths.items():
        for method, route in methods.items():
            about = escape(route.get("description", route.get("summary", "")))
            bodies = ", ".join(route.get("requestBody", {}).get("content", ()))
            yield f"<h2><code>{method.upper()} {escape(path)}</code></h2><p>{about}</p>"
            yield f"<p>Body: <code>{escape(bodies)}</code></p>" if bodies else ""
            yield _table([(p["name"], p["in"], _limits(p["schema"])) for p in route.get("parameters", ())])
            yield _table([(code, r["description"]) for code, r in sorted(route["responses"].items())])


def _limits(schema: Mapping[str, Any]) -> str:
    parts = [schema, *schema.get("anyOf", ())]
    return ", ".join(f"{key} {part[key]}" for part in parts for key in part if key not in ("title", "anyOf"))


def _table(rows: list[tuple[str, ...]]) -> str:
    cells = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table>{cells}</table>" if rows else ""
