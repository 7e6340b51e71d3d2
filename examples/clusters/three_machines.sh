#!/bin/sh
# I have three machines and ssh: one with two A100, one with an RTX 8000, one without a GPU, where the sweep is started. No launcher is
# needed (Ray's own for machines at hand knows no node types): each machine joins with `ray start` and says its class itself.
#
#     sh examples/clusters/three_machines.sh up        # once this package is installed on all three: the same version everywhere
#     farm preflight my_model.yaml --address auto      # versions on every node, and what the plan asks for that none can meet
#     farm sweep my_model.yaml --address auto --catalog /shared/kernels
#     sh examples/clusters/three_machines.sh down
#
# /shared is a folder that all three mount under that name; a bucket (s3://...) does as well. The machines reach each other on all ports.
# DRY_RUN=1 prints the commands instead of running them. From Ray 2.60 on, a head whose user has a token of Ray's asks every node for it:
# RAY_AUTH_MODE=token, once the same token lies on all three, and in the shell that starts the sweep, too.
set -eu

HEAD=${HEAD:-head.example.com}        # this machine, by the name that the others know
A100=${A100:-a100.example.com}
RTX8000=${RTX8000:-rtx8000.example.com}
ENV=${ENV:-~/farm-env/bin}            # where `pip install 'kernel-farm[gpu]'` put ray and farm, the same on all three

RAY_AUTH_MODE=${RAY_AUTH_MODE:-disabled}

run() { if [ -n "${DRY_RUN:-}" ]; then echo "$1: $2"; elif [ "$1" = "$HEAD" ]; then sh -c "$2"; else ssh "$1" "$2"; fi; }
start() { run "$1" "RAY_AUTH_MODE=$RAY_AUTH_MODE $ENV/ray start $2"; }

case ${1:-} in
up)
    # Two of the head's CPUs stay with the driver, the catalog's writer and the author.
    start "$HEAD" "--head --port=6379 --num-cpus=$(($(nproc) - 2 > 0 ? $(nproc) - 2 : 1)) --resources='{\"class_head\": 1}'"
    start "$A100" "--address=$HEAD:6379 --num-gpus=2 --resources='{\"class_a100\": 2}'"
    start "$RTX8000" "--address=$HEAD:6379 --num-gpus=1 --resources='{\"class_rtx8000\": 1}'"
    ;;
down)
    for machine in "$A100" "$RTX8000" "$HEAD"; do run "$machine" "$ENV/ray stop"; done
    ;;
*)
    echo "usage: $0 up | down" >&2
    exit 2
    ;;
esac
