"""The examples for clusters: they parse, and the commands and flags that they give exist."""

import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from topk_export.commands import score
from topk_registry.train.config.arguments import parse_args

EXAMPLES = Path(__file__).parents[1] / "docs/examples"


@pytest.mark.skipif(os.name != "posix", reason="needs bash")
@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.sbatch")), ids=lambda path: path.name)
def test_batch_scripts_parse(path):
    done = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^#SBATCH --[\w-]+(?:=\S+)?$", path.read_text(), re.MULTILINE)


def test_the_flags_of_the_training_script_exist():
    command = (EXAMPLES / "train.sbatch").read_text().partition("-m topk_registry train ")[2]
    flags = command.replace('"$@"', "").replace('"$SLURM_JOB_NAME-$SLURM_JOB_ID"', "run").split()
    config = parse_args(flags)
    assert (config.resume, config.recovery_interval) == ("auto", 500)


def test_the_kubernetes_job_restarts_a_command_that_exists():
    job = yaml.safe_load((EXAMPLES / "score-job.yaml").read_text())
    pod = job["spec"]["template"]["spec"]
    assert (job["kind"], pod["restartPolicy"]) == ("Job", "OnFailure")
    assert pod["securityContext"]["runAsNonRoot"]
    (container,) = pod["containers"]
    program, name, *argv = container["command"] + container["args"]
    assert (program, name) == ("topk-predict", "score")
    assert score._parser().parse_args(argv).workers == 4
