# What every training job does inside its allocation: where the nodes meet, NCCL's settings, and what follows a warning, a crash or the end.
# A script sets `run`, `nodes`, `gpus` (of a node) and `restarts`, sources this file (`terrella launch --job-shell` prints its path) and
# calls `supervise COMMAND...`.
set -u

start=${SLURM_RESTART_COUNT:-0}
# Every node starts one launcher; the first holds the run's lease and gives the others its address.
export TERRELLA_COORDINATOR=$(hostname):$((20000 + (SLURM_JOB_ID * 13 + start) % 20000))
if [ "$gpus" = 0 ]; then
  export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
else
  export OMP_NUM_THREADS=${OMP_NUM_THREADS:-8}
  export CUDA_DEVICE_MAX_CONNECTIONS=1                      # Megatron orders communication before computation by it
  export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
  export NCCL_DEBUG=${NCCL_DEBUG:-WARN}
  export NCCL_IB_TIMEOUT=${NCCL_IB_TIMEOUT:-22} NCCL_IB_RETRY_CNT=${NCCL_IB_RETRY_CNT:-13}   # survive a flapping link
  export TORCH_NCCL_ASYNC_ERROR_HANDLING=1                  # a lost peer is an error, not a hang
fi

# 120 s before the time limit SLURM warns this shell; the ranks then save at the next step and end with code 75.
asked=0 again=0 step=
requeue() { echo "launch: $1; back into the queue"; scontrol requeue "$SLURM_JOB_ID"; sleep 60; exit 75; }
ask() {
  asked=1 again=1
  echo "launch: the time limit is near, asking for a checkpoint"
  [ -z "$step" ] || kill -USR1 "$step"
  (sleep 90 && requeue "no checkpoint in time") &   # the steps since the last one are done again
}
trap ask USR1

supervise() {
  "$@" &
  step=$!
  [ "$asked" = 0 ] || kill -USR1 "$step"   # warned before it began
  while :; do
    again=0; wait "$step"; code=$?
    [ "$again" = 1 ] || break   # the warning interrupts the wait
  done
  case $code in
    0) exit 0 ;;
    75) requeue "saved and stopped" ;;
    2 | 3 | 4 | 6 | 10) exit "$code" ;;   # a setting, the disk, another owner, a number that cannot be right, an error of the program: for a person
  esac
  [ "$asked" = 1 ] && requeue "warned before there was anything to save"
  mkdir -p "$run/logs" && echo "$SLURM_JOB_ID $code" >> "$run/logs/crashes"
  [ "$(grep -c "^$SLURM_JOB_ID " "$run/logs/crashes")" -le "$restarts" ] && requeue "ended with code $code"
  echo "launch: ended with code $code more than $restarts times; giving up"
  exit "$code"
}
