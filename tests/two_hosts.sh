#!/usr/bin/env bash
# Train on two hosts: two network namespaces joined by a virtual cable, with one process each, own data folders, and a
# shared checkpoint folder. Needs root and iproute2, and skips where it may not make namespaces.
#
#     bash tests/two_hosts.sh
set -euo pipefail
cd "$(dirname "$0")/.."

first=host-a-$$ second=host-b-$$ work=$(mktemp -d)
cleanup() {
    for host in $first $second; do
        ip netns pids $host 2>/dev/null | xargs --no-run-if-empty kill -9 || true
        ip netns del $host 2>/dev/null || true
    done
    rm -rf "$work"
}
trap cleanup EXIT

command -v ip >/dev/null || { echo "skipped: needs iproute2"; exit 0; }
reason=$( { ip netns add $first && ip netns add $second && ip link add eth0 netns $first type veth peer eth0 netns $second; } 2>&1) ||
    { echo "skipped: $reason"; exit 0; }
for host in $first $second; do
    [ $host = $first ] && address=10.77.0.1 || address=10.77.0.2
    ip -n $host addr add $address/24 dev eth0
    ip -n $host link set eth0 up
    ip -n $host link set lo up
done

start() { # HOST NODE_RANK ARGUMENTS OF train.py
    local host=$1 node=$2
    shift 2
    DATA=$work/data$node GLOO_SOCKET_IFNAME=eth0 OMP_NUM_THREADS=1 timeout 300 ip netns exec $host \
        torchrun --nnodes 2 --node_rank $node --nproc_per_node 1 --master_addr 10.77.0.1 --master_port 29500 \
        tests/planted.py --images 512 train.py --synthetic -c "$work/ckpt" -i 1 "$@" 2>&1 | sed "s/^/host $node: /"
}
train() {
    start $second 1 "$@" &
    local other=$!
    start $first 0 "$@" | tee "$work/log"
    wait $other
}

train -n 2
train -n 3 -r latest
trained=$(grep -o "Accuracy of the model.*" "$work/log")
evaluated=$(python eval.py -c "$work/ckpt" -e latest --synthetic)
grep -q "Resuming after epoch 2" "$work/log"
[ "$(ls "$work/ckpt")" = "$(printf '%s\n' {lr_scheduler,model,optimizer}_{1,2,3}.pth)" ]
[ "$trained" = "$evaluated" ] || { echo "eval.py says otherwise: $evaluated"; exit 1; }
echo "Two hosts trained, saved once, resumed, and agree with eval.py: $evaluated"
