#!/bin/bash
# Ranks started by Open MPI's mpirun, or by MPICH's mpiexec, on this host or on those of a host file.
#
#     examples/cluster/mpirun.sh -n 8 [--hostfile hosts | --host node1,node2] script.py [argument ...]
#     examples/cluster/mpirun.sh -n 8 [--hostfile hosts | --host node1,node2] -m module [argument ...]
#
# What stands before the script goes to mpirun.
set -euo pipefail

launcher=$(command -v "${MPIRUN:-mpirun}") || { echo "mpirun.sh: no mpirun on PATH; set MPIRUN" >&2; exit 2; }
options=()
file=
first=
while [[ $# -gt 0 && $1 != *.py && $1 != -m ]]; do
    name=${1%%=*}
    case $name in
        -f | -hostfile | --hostfile | -machinefile | --machinefile | -H | -host | --host | -hosts | --hosts)
            if [[ $1 == "$name" ]]; then
                [[ $# -gt 1 ]] || { echo "mpirun.sh: $name needs a value" >&2; exit 2; }
                options+=("$1")
                shift
            fi
            value=${1#"$name="}
            if [[ $name == *f* ]]; then file=$value; else first=${value%%[,:]*}; fi
            ;;
    esac
    options+=("$1")
    shift
done
[[ $# -gt 0 ]] || { echo "mpirun.sh: expected a script.py, or -m module, behind the options of mpirun" >&2; exit 2; }

# Where several hosts take part, rank 0 runs on the first that is named, unless mpirun is told otherwise.
if [[ -z $first && -n $file ]]; then
    first=$(grep -vE '^ *(#|$)' "$file" | head -n 1 | sed 's/[ :].*//')
fi
if [[ -n $first && -z ${MASTER_ADDR-} ]]; then
    export MASTER_ADDR=$first
fi
export MESHDIST_SECRET=${MESHDIST_SECRET:-$(python3 -c 'import secrets; print(secrets.token_hex(32))')}

# Open MPI hands down only the variables that it is told by name; not their values, which others could see. As root, which
# one is in a container, it would not start.
if "$launcher" --version 2>&1 | grep -q "Open MPI"; then
    options+=(-x MESHDIST_SECRET ${MASTER_ADDR:+-x MASTER_ADDR})
    [[ $EUID -ne 0 ]] || options+=(--allow-run-as-root)
fi
exec "$launcher" "${options[@]}" python3 "$@"
