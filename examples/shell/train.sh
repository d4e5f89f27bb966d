#!/bin/sh
# Any language: files in a folder, and JSON lines for metrics. Here the "model" is a number that a shell can compute.
set -eu
outputs=${TRAINBUS_OUTPUT_DIR:-outputs}
journal=${TRAINBUS_JOURNAL:-/dev/stdout}
mkdir -p "$outputs"

stop=
trap 'stop=yes' TERM

step=0 sum=0
[ ! -f "$outputs/state" ] || read -r step sum <"$outputs/state"
while [ "$step" -lt "${STEPS:-20}" ] && [ -z "$stop" ]; do
    step=$((step + 1)) sum=$((sum + step * step))
    echo "$step $sum" >"$outputs/new"
    mv "$outputs/new" "$outputs/state"
    echo "{\"kind\": \"metrics\", \"step\": $step, \"values\": {\"sum\": $sum}}" >>"$journal"
    sleep "${STEP_S:-0}"
done
echo "step $step: $sum"
