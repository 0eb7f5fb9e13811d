#!/usr/bin/env bash
# rig.sh - runs one command inside a throw-away virtual machine that has the hardware which
# this host lacks: soft-RoCE NICs, NVMe drives, NVMe over fabrics, NUMA nodes, CXL memory.
#
#   rig.sh [options] -- command [argument...]   run it; the exit status is the command's
#   rig.sh --prep [--kernel K]                  only fetch and prepare
#
# Needs root on Debian 12: packages are fetched with apt-get from the mirror that the host uses, and unpacked into a
# cache ($RIG_CACHE, default ~/.cache/kvplane-rig), not installed. What it says about itself is in docs/rig.md.
#
# The machine's root is this host's root, read-only under an overlay in memory: everything installed here is there, and
# nothing written to it stays. /tmp, /var/tmp and /dev/shm start empty. One directory, the share, is mounted read-write
# at its own path. The command starts in the current directory, with RIG=1 set and the machine's parts in RIG_NUMA,
# RIG_RXE, RIG_NVME, RIG_NVMET, RIG_CXL and RIG_HUGEPAGES.
#
#   --kernel K       bpo (6.12, backports; default) | stable (6.1, the host's own) | new (trixie's backports)
#   --cpus N         virtual cores, default 2; rounded up to a multiple of --numa
#   --mem MB         memory, default 2048
#   --numa N         N NUMA nodes; memory, cores, PCI NICs and drives are dealt out to them in turns
#   --hmat           with --numa: tables of latency and bandwidth between the nodes
#   --rxe N          N soft-RoCE devices rxe0.. on nic0.., 10.77.0.1.., in one segment. The other end of cable I is swI:
#                    "ip link set swI down" pulls it, "tc qdisc add dev swI root netem loss 1%" makes it bad
#   --nic KIND       veth (default) | virtio | e1000e | igb: the last three are PCI NICs on a hub, without swI
#   --mtu N          of the NICs, default 9000 (RoCE 4096)
#   --nvme N[:MB]    N NVMe drives of MB each (256): /dev/rig/dI, and /dev/rig/dIg for passthrough
#   --poll-queues N  of nvme, default 2
#   --nvmet T        exports every drive by nvmet and connects to it: tcp | rdma (from rxe0 to rxe1) | loop
#   --cxl MB         a CXL memory expander, as a NUMA node without cores (not with --kernel stable). No emulated device
#                    can reach it by DMA
#   --hugepages N    2 MiB pages, over all nodes
#   --share DIR      the share, default the current directory
#   --env NAME       hands a variable on (repeatable)      --modprobe M   loads module M first (repeatable)
#   --timeout S      ends the machine after S seconds, default 120
#   --boot S         starts it again where the command has not begun after S seconds, twice at most; default 90
#   --setup FILE     a bash file, read in the machine just before the command
#   --qemu "ARGS"    more arguments for QEMU               --append "ARGS" more for the kernel
#   -v               timings on stderr, and the console's log in rig-console.log
#
# Exit status: the command's; 2 for arguments that make no sense; 124 when the time was over; 125 when the machine could
# not be prepared or died, with the reason on stderr.
set -euo pipefail

here=$(dirname "$(realpath "${BASH_SOURCE[0]}")")
die() { echo "rig: $*" >&2; exit 125; }
misuse() { echo "rig: $* (see --help)" >&2; exit 2; }

CACHE=${RIG_CACHE:-${XDG_CACHE_HOME:-${HOME:-/tmp}/.cache}/kvplane-rig}
KERNEL=${RIG_KERNEL:-bpo} CPUS=2 MEM=2048 NUMA=1 HMAT=0 RXE=0 NIC=veth MTU=9000 NVME=0 NVME_MB=256 POLLQ=2 NVMET=''
CXL=0 HUGE=0 SHARE=$PWD TIMEOUT=120 BOOT=90 MORE_QEMU='' MORE_KERNEL='' VERBOSE=0 PREPARE_ONLY=0 VARIABLES=() MODULES=() SETUP=''

# ---------------------------------------------------------------- arguments
# A number of at least the third argument and at most the fourth.
number() {
  [[ $2 =~ ^(0|[1-9][0-9]{0,6})$ ]] || misuse "$1 takes a number, not \"$2\""
  (($2 >= $3 && $2 <= $4)) || misuse "$1 takes $3 to $4, not $2"
}
one_of() {
  local name=$1 value=$2 known; shift 2
  for known; do [[ $value == "$known" ]] && return; done
  misuse "$name takes one of: $*; not \"$value\""
}
while (($#)); do
  case $1 in
    -h | --help) sed -n '2,/^set -/p' "${BASH_SOURCE[0]}" | sed '$d;s/^# \{0,1\}//'; exit 0 ;;
    --prep) PREPARE_ONLY=1; shift; continue ;;
    --hmat) HMAT=1; shift; continue ;;
    -v) VERBOSE=1; shift; continue ;;
    --) shift; break ;;
    --kernel | --cpus | --mem | --numa | --rxe | --nic | --mtu | --nvme | --poll-queues | --nvmet | --cxl | --hugepages | \
      --share | --env | --modprobe | --timeout | --boot | --setup | --qemu | --append) ;;
    -*) misuse "unknown option $1" ;;
    *) misuse "\"$1\" is no option; the command goes behind --" ;;
  esac
  (($# > 1)) && [[ $2 != -- ]] || misuse "$1 takes a value"
  case $1 in
    --kernel) KERNEL=$2 ;;
    --cpus) number "$1" "$2" 1 64; CPUS=$2 ;;
    --mem) number "$1" "$2" 512 65536; MEM=$2 ;;
    --numa) number "$1" "$2" 1 8; NUMA=$2 ;;
    --rxe) number "$1" "$2" 0 8; RXE=$2 ;;
    --nic) NIC=$2 ;;
    --mtu) number "$1" "$2" 1280 9000; MTU=$2 ;;
    --nvme)
      NVME=${2%%:*}; number "$1" "$NVME" 0 16
      if [[ $2 == *:* ]]; then NVME_MB=${2#*:}; number "$1 N:" "$NVME_MB" 1 1048576; fi ;;
    --poll-queues) number "$1" "$2" 0 16; POLLQ=$2 ;;
    --nvmet) NVMET=$2; one_of "$1" "$2" tcp rdma loop ;;
    --cxl) number "$1" "$2" 0 4096; ((${2} % 256 == 0)) || misuse "$1 takes a multiple of 256, not $2"; CXL=$2 ;;
    --hugepages) number "$1" "$2" 0 32768; HUGE=$2 ;;
    --share) [ -d "$2" ] || misuse "$1: there is no directory $2"; SHARE=$(realpath "$2") ;;
    --env) [[ $2 =~ ^[A-Za-z_][A-Za-z0-9_]*$ ]] || misuse "$1 takes the name of a variable, not \"$2\""; VARIABLES+=("$2") ;;
    --modprobe) MODULES+=("$2") ;;
    --timeout) number "$1" "$2" 1 86400; TIMEOUT=$2 ;;
    --boot) number "$1" "$2" 1 86400; BOOT=$2 ;;
    --setup) [ -f "$2" ] || misuse "$1: there is no file $2"; SETUP=$(realpath "$2") ;;
    --qemu) MORE_QEMU=$2 ;;
    --append) MORE_KERNEL=$2 ;;
  esac
  shift 2
done
one_of --kernel "$KERNEL" bpo stable new
one_of --nic "$NIC" veth virtio e1000e igb
((PREPARE_ONLY || $#)) || misuse "no command was given"
((!HMAT || NUMA > 1)) || misuse "--hmat says how far nodes are from each other: give --numa 2 or more with it"
[[ ! $NVMET || $NVME != 0 ]] || misuse "--nvmet has no drive to export: give --nvme 1 or more with it"
[[ $NVMET != rdma ]] || ((RXE >= 2)) || misuse "--nvmet rdma goes from rxe0 to rxe1: give --rxe 2 or more with it"
[[ $KERNEL != stable || $CXL == 0 ]] || misuse "--cxl: the kernel \"stable\" brings no CXL memory up; take bpo or new"
[[ $KERNEL != stable || $NVMET != loop ]] || misuse "--nvmet loop: the kernel \"stable\" does not have it"
[[ $SHARE != / ]] || misuse "/ cannot be the share: start this in a directory, or name one with --share"
CPUS=$(((CPUS + NUMA - 1) / NUMA * NUMA))

# ---------------------------------------------------------------- what must be here
[[ $(uname -sm) == "Linux x86_64" ]] || die "the machine is a Linux on x86_64, and so must be its host; this is $(uname -sm)"
((EUID == 0)) || die "needs root: its machine reads the whole of this host's root file system"
PATH=$PATH:/usr/sbin:/sbin
KERNELS=$CACHE/$KERNEL
QEMU=${RIG_QEMU:-$CACHE/qemu/usr/bin/qemu-system-x86_64}
. "$here/prepare.sh"
prepare
VERSION=$(cat "$KERNELS/version")
((PREPARE_ONLY)) && { echo "rig: ready: $("$QEMU" --version | head -n 1), Linux $VERSION" >&2; exit 0; }

# ---------------------------------------------------------------- one run
began=$(date +%s%N)
# Files that the machine and this share lie in memory: drives are sparse, and go with the run.
T=$(mktemp -d "${RIG_TMP:-/dev/shm}/rig.XXXXXX") CHILD=
trap '[[ $CHILD ]] && kill "$CHILD" 2>/dev/null; rm -rf "$T"' EXIT
trap 'exit 143' TERM INT HUP
. "$here/guest.sh"
build_guest "$@"
. "$here/machine.sh"
describe_machine
CONSOLE=$T/console booted=$(date +%s%N)
# While a kernel with several cores boots, the emulator has rare races of its own: the machine dies, stands still, or has
# no idea of time (see guest.sh). The command has not begun then.
for try in 1 2 3; do
  run_machine
  case $STATUS in
    124 | 137) break ;;
    boot) why="was not ready after $BOOT s" ;;
    *)
      if [ -s "$T/rc" ] || grep -aq 'RIG: ready' "$CONSOLE"; then break; fi
      why="died before the command began (status $STATUS)"
      ! grep -aq 'RIG: a clock' "$CONSOLE" || why="has $(grep -ao 'a clock that runs.*' "$CONSOLE" | tail -n 1 | tr -d '\r')" ;;
  esac
  echo "rig: the machine $why, try $try of 3" >&2
done
ended=$(date +%s%N)
((VERBOSE)) && cp "$CONSOLE" "${RIG_CONSOLE:=rig-console.log}"
grep -a RIG: "$CONSOLE" | { ((VERBOSE)) && cat || grep -av 'RIG: ready'; } >&2 || true
if ((VERBOSE)); then
  echo "rig: $VERSION: set up $(((booted - began) / 1000000)) ms, ran $(((ended - booted) / 1000000)) ms;" \
    "console in $RIG_CONSOLE" >&2
fi
# Whether it worked to its last moment, or stood still, the console may say.
last_words() { echo "rig: $1; the end of its console:" >&2; tail -c 3000 "$CONSOLE" >&2; exit "$2"; }
[[ $STATUS != 124 && $STATUS != 137 ]] || last_words "the time of $TIMEOUT s was over (--timeout)" 124
[ -s "$T/rc" ] || last_words "the machine died without a result (status $STATUS)" 125
exit "$(tr -dc 0-9 <"$T/rc")"
