#!/usr/bin/env bash
# tests/gpu/run.sh PART [--wheels DIR] [OPTION...]: run a part of what only a GPU can say. Without a network, from a plain
# copy of this project.
#
#   tests/gpu/wheels.sh DIR             beforehand, where there is a network: four megabytes of wheels for Python 3.12
#   tests/gpu/run.sh kernels --wheels DIR --results OUT
#   tests/gpu/run.sh speed --wheels DIR --results OUT ; then training, study
#
# --wheels DIR (or TOPK_WHEELS=DIR): install them, and this checkout, into an environment of their own above the packages
# of $PYTHON (python3); it is made once, in $TOPK_GPU_ENVIRONMENT (/tmp/topk-gpu). Without it $PYTHON must have the project.
# All other options: tests/gpu/run.sh --help.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3} wheels=${TOPK_WHEELS:-} given=()
while [ $# -gt 0 ]; do
  case $1 in
    --wheels) wheels=$2 && shift 2 ;;
    *) given+=("$1") && shift ;;
  esac
done
if [ -n "$wheels" ]; then
  place=${TOPK_GPU_ENVIRONMENT:-/tmp/topk-gpu}
  if [ ! -e "$place/ready" ]; then
    rm -rf "$place"
    "$python" -m venv --without-pip "$place"
    own=$("$place/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    # the packages of the machine's Python come after those of the wheels
    "$python" -c 'import sys; print(*(p for p in sys.path if p.endswith("-packages")), sep="\n")' >"$own/machine.pth"
    install=("$python" -m pip --disable-pip-version-check --python "$place/bin/python" install --quiet --no-index --no-deps)
    "${install[@]}" "$wheels"/*.whl
    "${install[@]}" --no-build-isolation --editable .
    touch "$place/ready"
  fi
  python=$place/bin/python
  export PATH="$place/bin:$PATH"
fi
exec "$python" -m tests.gpu "${given[@]}"
