#!/usr/bin/env bash
# The tests, then the accuracy gate: `bash test_ci.sh`, from any folder.
#
# It makes or reuses a virtual environment and installs requirements.txt there. The gate trains with each plugin on all
# GPUs; without a GPU, with torch_ddp on two processes on the synthetic set. Environment variables change this:
#   VENV         folder of the virtual environment (.venv beside this script); none: use python3 with what it has
#   PYTHON       the Python that makes it (python3)
#   NPROC        processes of the gate (all GPUs; 2 without a GPU)
#   EPOCHS       epochs of the gate (80; 3 without a GPU)
#   TARGET_ACC   accuracy that the gate demands (0.84; 0.8 without a GPU)
#   PLUGINS      plugins of the gate, in one string (all four; torch_ddp without a GPU)
set -uo pipefail

fail() {
    echo "test_ci.sh: FAILED: $*" >&2
    exit 1
}

caller=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")" || exit 1

# ------------------------------------------------------------------------------------------------------ environment

require_version() {
    command -v "$1" > /dev/null || fail "there is no $1: install Python 3.10, 3.11 or 3.12, or set PYTHON"
    "$1" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))' ||
        fail "requirements.txt needs Python 3.10, 3.11 or 3.12, and $1 is $("$1" -V 2>&1): set PYTHON or VENV"
}

if [ "${VENV:=$PWD/.venv}" != none ]; then
    case $VENV in /*) ;; *) VENV=$caller/$VENV ;; esac
    if [ ! -x "$VENV/bin/pip" ]; then
        : "${PYTHON:=python3}"
        require_version "$PYTHON"
        "$PYTHON" -c 'import ensurepip' 2> /dev/null ||
            fail "$PYTHON lacks ensurepip, so it can make no virtual environment (Debian: apt install python3-venv)"
        "$PYTHON" -m venv "$VENV" || fail "no virtual environment could be made in $VENV"
    fi
    require_version "$VENV/bin/python3"
    export PATH="$VENV/bin:$PATH"
    # pip needs seconds to find that there is nothing to do; a copy of the file that it last installed tells at once
    if ! cmp -s requirements.txt "$VENV/installed-requirements.txt"; then
        echo "Installing requirements.txt into $VENV (the first time some minutes, 6 GB)"
        python3 -m pip install --quiet --disable-pip-version-check -r requirements.txt ||
            fail "requirements.txt could not be installed into $VENV"
        cp requirements.txt "$VENV/installed-requirements.txt"
    fi
fi
gpus=$(python3 -c 'import torch, colossalai; print(torch.cuda.device_count())' 2>&1) ||
    fail "torch and colossalai cannot be imported: $(tail -n 1 <<< "$gpus")"
gpus=$(tail -n 1 <<< "$gpus")

# ------------------------------------------------------------------------------------------------------------ tests

failed=()
python3 -m pytest tests || failed+=("the tests")

# ------------------------------------------------------------------------------------------------------------- gate

# gate PLUGIN ARGUMENT...: train with torchrun, since `colossalai run` prints the whole environment when a run fails
gate() {
    local log
    log=$(mktemp)
    echo "Gate: $*, $NPROC processes, $EPOCHS epochs, accuracy of at least $TARGET_ACC"
    python3 -m torch.distributed.run --standalone --nproc_per_node "$NPROC" train.py -p "$@" \
        --interval 0 -n "$EPOCHS" --target_acc "$TARGET_ACC" 2>&1 | tee "$log" &&
        grep -q '^Accuracy of the model on the test images: ' "$log" || failed+=("the gate of $1")
    rm -f "$log"
}

if [ "$gpus" -gt 0 ]; then
    : "${NPROC:=$gpus}" "${EPOCHS:=80}" "${TARGET_ACC:=0.84}"
    for plugin in ${PLUGINS:-torch_ddp torch_ddp_fp16 low_level_zero gemini}; do
        gate "$plugin"
    done
else
    : "${NPROC:=2}" "${EPOCHS:=3}" "${TARGET_ACC:=0.8}"
    for plugin in ${PLUGINS:-torch_ddp}; do
        gate "$plugin" --synthetic
    done
fi

[ ${#failed[@]} -eq 0 ] || fail "$(printf '%s; ' "${failed[@]}")see above"
echo "test_ci.sh: passed"
