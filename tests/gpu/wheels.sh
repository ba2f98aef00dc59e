#!/usr/bin/env bash
# tests/gpu/wheels.sh DIR [PACKAGE...]: collect the wheels that tests/gpu/run.sh needs on a machine without a network, for
# Python 3.12 (or $VERSION) on Linux x86_64: four megabytes, pure Python alone. Packages that are named come as well:
# numba and llvmlite (64 MB) where the machine's own do not import, 'numpy<2.4' (17 MB) to rehearse with Triton 3.6, whose
# interpreter needs it. The kernels of a GPU need neither.
set -euo pipefail
[ $# -ge 1 ] || { sed -n '2,5s/^# //p' "$0" >&2; exit 2; }
folder=$1 python=${PYTHON:-python3}
shift
pip=("$python" -m pip --disable-pip-version-check)
platforms=()
for glibc in 2_17 2_27 2_28 2_31 2_34; do platforms+=(--platform "manylinux_${glibc}_x86_64"); done

# what this project and its tests import and a machine for PyTorch may lack, and what installs a checkout
packages=(array-api-compat entmax pytopk timm hatchling editables pathspec pluggy packaging trove-classifiers "$@")
mkdir -p "$folder"
"${pip[@]}" download --quiet --no-deps --only-binary=:all: --python-version "${VERSION:-3.12}" --implementation cp \
  "${platforms[@]}" --dest "$folder" "${packages[@]}"
# these two are published as sources, and are pure Python
"${pip[@]}" wheel --quiet --no-deps --wheel-dir "$folder" 'difftopk>=0.2' 'diffsort>=0.2'
du -sh "$folder"
