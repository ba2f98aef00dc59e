"""The image and the compose file of the service: every command, port, path, pin and metric is the program's own."""

import json
import re
import shlex
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.export.colours import exported, png
from tests.export.serve.service import predict, request, served, wait_until
from topk_export import Predictor
from topk_export.commands import serve

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "docs/examples/service"
PORT = 8000


@pytest.fixture(scope="module")
def port(tmp_path_factory):
    """The port of a service in this process that has answered a request."""
    with served(Predictor(exported(tmp_path_factory.mktemp("model") / "m.onnx"), device="cpu", threads=1)) as port:
        wait_until(lambda: request(port, "GET", "/readyz")[0] == 200)
        assert predict(port, png("red"))[0] == 200
        yield port


def instructions():
    """The instructions of the Dockerfile, name and rest, lines that go on joined."""
    text = (EXAMPLE / "Dockerfile").read_text().replace("\\\n", " ")
    return [line.split(maxsplit=1) for line in text.splitlines() if line and not line.startswith("#")]


def said(name):
    return [rest for each, rest in instructions() if each == name]


def compose():
    return yaml.safe_load((EXAMPLE / "compose.yaml").read_text())


def test_the_image_is_pinned_and_runs_without_rights():
    assert {instruction for instruction, _ in instructions()} <= {
        *("FROM", "COPY", "WORKDIR", "ENV", "RUN", "USER", "EXPOSE", "HEALTHCHECK", "STOPSIGNAL", "ENTRYPOINT", "CMD"),
    }
    assert all(re.match(r"python:\d+\.\d+\.\d+-slim-\w+( AS \w+)?$", base) for base in said("FROM"))
    user, _, group = said("USER")[-1].partition(":")
    assert int(user) > 0
    assert int(group) > 0
    assert f"--uid {user} " in " ".join(said("RUN"))


def test_the_command_of_the_image_and_of_compose_is_understood():
    program, command, *rest = json.loads(said("ENTRYPOINT")[0])
    assert (program, command, rest) == ("topk-predict", "serve", [])
    project = tomllib.loads((ROOT / "export/pyproject.toml").read_text())["project"]
    assert program in project["scripts"]
    for argv in (json.loads(said("CMD")[0]), compose()["services"]["topk"]["command"]):
        args = serve._parser().parse_args(argv)
        assert (args.host, args.port, args.workers) == ("0.0.0.0", PORT, 2)
    assert said("EXPOSE") == [str(PORT)]


def test_the_build_copies_what_the_distribution_is_made_of():
    """The context holds what is not ignored, and the distribution's own files name the rest."""
    kept = [line[1:] for line in (EXAMPLE / "Dockerfile.dockerignore").read_text().splitlines() if line[0] == "!"]
    build = tomllib.loads((ROOT / "export/pyproject.toml").read_text())["tool"]["hatch"]["build"]
    included = build["targets"]["wheel"]["force-include"]
    for path in ["export/pyproject.toml", *(name.removeprefix("../") for name in included)]:
        assert (ROOT / path).exists()
        assert any(path.startswith(f"{each}/") for each in kept), path
    constraints = said("ENV")[0].partition("=")[2].removeprefix("/source/")
    assert constraints in kept
    assert (ROOT / constraints).exists()
    context = compose()["services"]["topk"]["build"]
    assert (EXAMPLE / context["context"]).resolve() == ROOT
    assert (ROOT / context["dockerfile"]) == EXAMPLE / "Dockerfile"


def test_every_package_of_the_image_is_pinned():
    lines = (EXAMPLE / "constraints.txt").read_text().splitlines()[1:]
    pins = {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}
    project = tomllib.loads((ROOT / "export/pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    wanted = [
        *project["project"]["dependencies"],
        *extras["cpu"],
        *extras["serve"],
        *project["build-system"]["requires"],
    ]
    place = {"extra": "", "sys_platform": "linux", "python_version": "3.12", "python_full_version": "3.12.11"}
    seen, checked = set(), 0
    wanted = [(text, True) for text in wanted]
    while wanted:
        text, is_of_pinned = wanted.pop()
        requirement = Requirement(text)
        name = canonicalize_name(requirement.name)
        if name in seen or (requirement.marker and not requirement.marker.evaluate(place)):
            continue
        seen.add(name)
        assert name in pins, f"constraints.txt does not pin {name}"
        if is_of_pinned:
            checked += 1
            assert pins[name] in requirement.specifier, requirement
        try:
            # a newer release than the pinned one, which may be here, may ask for other versions
            wanted += [(text, version(name) == pins[name]) for text in requires(name) or []]
        except PackageNotFoundError:  # onnxruntime has several distributions; its own needs are pinned all the same
            assert name == "onnxruntime"
    assert checked >= len(project["project"]["dependencies"])


def test_the_health_check_tells_a_service_that_answers(port):
    """The very command of the image, at the port of a service that is there, and at one where nothing is."""
    check = said("HEALTHCHECK")[0]
    assert check.startswith("--interval=")
    command = json.loads(check.partition("CMD ")[2])
    assert command[0] == "python"
    assert f":{PORT}/readyz" in command[2]
    for there, status in ((port, 0), (1, 1)):
        code = command[2].replace(f":{PORT}/", f":{there}/")
        assert subprocess.run([sys.executable, *command[1:2], code], capture_output=True).returncode == status


def test_compose_mounts_files_that_are_there_and_serves_this_machine_alone():
    services = compose()["services"]
    assert set(services) == {"topk", "prometheus", "grafana"}
    for name, service in services.items():
        assert all(published.startswith("127.0.0.1:") for published in service["ports"])
        assert set(service.get("depends_on", ())) < set(services)
        assert "image" not in service or re.fullmatch(r"[\w/]+:v?\d+\.\d+\.\d+", service["image"]), name
        for volume in service["volumes"]:
            source = volume.partition(":")[0]
            if source.startswith("./") and source != "./models":
                assert (EXAMPLE / source).is_file()
            elif not source.startswith("./"):
                assert source in compose()["volumes"]
    topk = services["topk"]
    assert topk["ports"] == [f"127.0.0.1:{PORT}:{PORT}"]
    assert topk["read_only"]
    assert topk["command"][0].startswith(topk["volumes"][0].split(":")[1])  # the model is where the volume is
    mounted = [volume.split(":")[1] for volume in services["prometheus"]["volumes"]]
    assert services["prometheus"]["command"][0].partition("=")[2] in mounted


def test_prometheus_asks_the_service_and_grafana_asks_prometheus(port):
    (job,) = yaml.safe_load((EXAMPLE / "prometheus.yaml").read_text())["scrape_configs"]
    assert job["static_configs"] == [{"targets": [f"topk:{PORT}"]}]
    assert request(port, "GET", job["metrics_path"])[0] == 200
    (source,) = yaml.safe_load((EXAMPLE / "grafana/sources.yaml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    (provider,) = yaml.safe_load((EXAMPLE / "grafana/providers.yaml").read_text())["providers"]
    mounted = [volume.split(":")[1] for volume in compose()["services"]["grafana"]["volumes"]]
    assert f"{provider['options']['path']}/dashboard.json" in mounted
    panels = json.loads((EXAMPLE / "grafana/dashboard.json").read_text())["panels"]
    assert {target["datasource"]["uid"] for panel in panels for target in panel["targets"]} == {source["uid"]}


def test_every_metric_of_the_dashboard_is_the_services(port):
    text = request(port, "GET", "/metrics")[1]
    samples = re.findall(r"^(topk_\w+?)(?:\{(.*?)\})? ", text, re.MULTILINE)
    known = {name: set(re.findall(r"(\w+)=", labels)) for name, labels in samples}
    panels = json.loads((EXAMPLE / "grafana/dashboard.json").read_text())["panels"]
    shown = set()
    for expression in (target["expr"] for panel in panels for target in panel["targets"]):
        assert expression.count("(") == expression.count(")")
        names = set(re.findall(r"\btopk_\w+", expression))
        assert names <= set(known), expression
        labels = set().union(*(known[name] for name in names)) | {"job"}
        for group in re.findall(r"\bby \((.*?)\)|\{(\w+)=", expression):
            assert {label.strip() for label in "".join(group).split(",")} <= labels, expression
        shown |= names
    # and the dashboard leaves none of them out: _created are times, _bucket, _sum and _count are of one histogram
    families = {re.sub(r"_(bucket|sum|count|total)$", "", name) for name in known if not name.endswith("_created")}
    assert families == {re.sub(r"_(bucket|sum|count|total)$", "", name) for name in shown}


def test_the_commands_in_the_comments_name_files_that_are_there():
    for name in ("Dockerfile", "compose.yaml"):
        (line,) = re.findall(r"^#\s+(docker .* -f .*)$", (EXAMPLE / name).read_text(), re.MULTILINE)
        words = shlex.split(line)
        assert (ROOT / words[words.index("-f") + 1]).is_file()
