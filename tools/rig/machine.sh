# shellcheck shell=bash disable=SC2034
# Read by rig.sh: the machine as QEMU's arguments, and one attempt to run it.

ARGUMENTS=() SLOT=0 BUS=

describe_machine() {
  local port machine=q35 cpu=max
  ((!CXL)) || machine+=,cxl=on,cxl-fmw.0.targets.0=cxl.0,cxl-fmw.0.size=4G
  ((!HMAT)) || machine+=,hmat=on
  # The kernel refuses the cache flushes that a CXL region needs where it knows that it is a guest.
  ((!CXL)) || cpu+=,-hypervisor
  # No KVM: that it can be opened does not say that it can run a stock kernel.
  ARGUMENTS=(-M "$machine" -accel tcg,thread=multi,tb-size=256 -cpu "$cpu" -smp "$CPUS,sockets=$NUMA" -m "$MEM"
    -nodefaults -no-user-config -display none -no-reboot -kernel "$KERNELS/vmlinux" -initrd "$T/initrd"
    -append "console=ttyS0 quiet loglevel=4 panic=-1 nokaslr mitigations=off tsc=reliable $(clock_option) random.trust_cpu=on $MORE_KERNEL"
    -serial "file:$T/console" -device virtio-serial-pci)
  [[ ${RIG_QEMU:-} ]] || ARGUMENTS+=(-L "$CACHE/qemu/usr/share/seabios" -L "$CACHE/qemu/usr/share/qemu")
  # Output comes through pipes, byte by byte as it was written; the exit status through a file.
  : >"$T/rc"; mkfifo "$T/out" "$T/err"
  for port in out err rc; do
    ARGUMENTS+=(-chardev "file,id=$port,path=$T/$port,append=on" -device "virtserialport,chardev=$port,name=$port")
  done
  share rigroot / security_model=none,readonly=on
  share rigshare "$SHARE" security_model=passthrough
  share rigmods "$KERNELS/lib/modules/$VERSION" security_model=none,readonly=on
  # Without a table of nodes, the kernel would take CXL memory for memory of the only node, and use it for itself.
  ((NUMA == 1 && !CXL)) || add_nodes
  add_devices
}

# The emulator passes the clock of the host's processor through. A machine that measures its frequency beside other work
# is wrong by whole factors now and then. So the machine gets what the host's kernel reports, if it does.
clock_option() {
  local mhz='[0-9]*\.[0-9]\{3\}' found
  found=$(dmesg 2>/dev/null | sed -n "s/.*tsc: .*[ :]\($mhz\) MHz.*/\1/p" | tail -n 1) || true
  # In a virtual machine, the processor's frequency is that of its clock.
  [[ $found ]] || ! grep -qw hypervisor /proc/cpuinfo ||
    found=$(sed -n "s/^cpu MHz.*[^0-9]\($mhz\)$/\1/p" /proc/cpuinfo | head -n 1)
  [[ ! $found ]] || echo "tsc_early_khz=${found/./}"
}

share() {
  ARGUMENTS+=(-fsdev "local,id=$1,path=$2,multidevs=remap,$3" -device "virtio-9p-pci,fsdev=$1,mount_tag=$1")
}

# Each node has memory, cores, and a PCI Express host bridge of its own.
add_nodes() {
  local n i near far=21
  # The kernel takes nodes without a distance, such as those of CXL, for 20 away, and takes memory from the nearest.
  ((!CXL)) || far=16
  for ((n = 0; n < NUMA; n++)); do
    ARGUMENTS+=(-object "memory-backend-ram,id=m$n,size=$((MEM / NUMA))M"
      -numa "node,nodeid=$n,memdev=m$n,cpus=$((n * CPUS / NUMA))-$(((n + 1) * CPUS / NUMA - 1))"
      -device "pxb-pcie,id=pxb$n,bus=pcie.0,bus_nr=$((16 * (n + 1))),numa_node=$n")
  done
  for ((n = 0; n < NUMA; n++)); do
    for ((i = 0; i < NUMA; i++)); do
      near=$((n == i)); ARGUMENTS+=(-numa "dist,src=$n,dst=$i,val=$((near ? 10 : far))")
      ((!HMAT)) || ARGUMENTS+=(
        -numa "hmat-lb,initiator=$n,target=$i,hierarchy=memory,data-type=access-latency,latency=$((near ? 90 : 160))"
        -numa "hmat-lb,initiator=$n,target=$i,hierarchy=memory,data-type=access-bandwidth,bandwidth=$((near ? 40 : 20))G")
    done
  done
}

# Sets BUS to where device number $1 goes: a root port below the host bridge of its node.
place() {
  BUS=pcie.0
  ((NUMA > 1)) || return 0
  SLOT=$((SLOT + 1)) BUS=port$SLOT
  ARGUMENTS+=(-device "pcie-root-port,id=$BUS,bus=pxb$(($1 % NUMA)),chassis=$SLOT,slot=$SLOT")
}

add_devices() {
  local i device queues=$((CPUS + POLLQ))
  for ((i = 0; i < NVME; i++)); do
    truncate -s "${NVME_MB}M" "$T/nvme$i"; place "$i"
    ARGUMENTS+=(-drive "file=$T/nvme$i,if=none,id=d$i,format=raw,cache=unsafe,discard=unmap"
      -device "nvme,serial=rig$i,drive=d$i,bus=$BUS,max_ioqpairs=$queues,msix_qsize=$((queues + 1))")
  done
  if [[ $NIC != veth ]]; then
    for ((i = 0; i < RXE; i++)); do
      place "$i"; device=$NIC
      [[ $NIC != virtio ]] || device=virtio-net-pci,host_mtu=$MTU
      ARGUMENTS+=(-netdev "hubport,id=h$i,hubid=0"
        -device "$device,id=nic$i,netdev=h$i,mac=$(mac_of "$i"),bus=$BUS,romfile=")
    done
  fi
  ((!CXL)) || ARGUMENTS+=(-object "memory-backend-ram,id=cxlm,size=${CXL}M"
    -device pxb-cxl,bus_nr=200,bus=pcie.0,id=cxl.0 -device cxl-rp,port=0,bus=cxl.0,id=cxlrp0,chassis=99,slot=99
    -device cxl-type3,bus=cxlrp0,volatile-memdev=cxlm,id=cxl-vmem0,sn=1)
}

# Runs the machine to its end and leaves QEMU's status in STATUS, or "boot" where it was ended as it did not get ready.
run_machine() {
  local out err looks=$((BOOT * 5))
  cat "$T/out" & out=$!
  cat "$T/err" >&2 & err=$!
  exec 8>"$T/out" 9>"$T/err" # held open here: QEMU may die before it opens them
  STATUS=0
  # It dies with us, however we die.
  # shellcheck disable=SC2086
  setpriv --pdeathsig TERM timeout -k 2 "$TIMEOUT" "$QEMU" "${ARGUMENTS[@]}" $MORE_QEMU \
    </dev/null 2>"$T/qemu" 8>&- 9>&- & CHILD=$!
  until grep -aqs 'RIG: ready' "$CONSOLE" || ! kill -0 "$CHILD" 2>/dev/null || ((looks-- == 0)); do sleep 0.2; done
  # `timeout` leads a process group. An emulator that stands still hears no milder signal.
  ((looks >= 0)) || kill -KILL -- "-$CHILD"
  wait "$CHILD" 2>/dev/null || STATUS=$?
  ((looks >= 0)) || STATUS=boot
  CHILD=
  exec 8>&- 9>&-
  wait "$out" "$err"
  grep -v 'is not connected to host network\|terminating on signal' "$T/qemu" >&2 || true
}
