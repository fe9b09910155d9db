#!/bin/bash
# Ranks started by Open MPI's mpirun, or by MPICH's mpiexec, on this host or on those of a host file.
#
#     examples/cluster/mpirun.sh -n 8 [--hostfile hosts] script.py [argument ...]
#
# What stands before the script goes to mpirun.
set -euo pipefail

launcher=$(command -v "${MPIRUN:-mpirun}") || { echo "mpirun.sh: no mpirun on PATH; set MPIRUN" >&2; exit 2; }
options=()
while [[ $# -gt 0 && $1 != *.py ]]; do
    options+=("$1")
    shift
done

# Where several hosts take part, rank 0 runs on the first host of the host file, unless mpirun is told otherwise.
hosts=$(printf '%s\n' "${options[@]}" | grep -A1 -xE -- '--?(host|machine)file|-f' | tail -n 1 || true)
if [[ -n $hosts && -z ${MASTER_ADDR-} ]]; then
    MASTER_ADDR=$(grep -vE '^ *(#|$)' "$hosts" | head -n 1 | sed 's/[ :].*//')
    export MASTER_ADDR
fi
export MESHDIST_SECRET=${MESHDIST_SECRET:-$(python3 -c 'import secrets; print(secrets.token_hex(32))')}

# Open MPI hands down only the variables that it is told by name; not their values, which others could see.
if "$launcher" --version 2>&1 | grep -q "Open MPI"; then
    options+=(-x MESHDIST_SECRET ${MASTER_ADDR:+-x MASTER_ADDR})
fi
exec "$launcher" "${options[@]}" python3 "$@"
