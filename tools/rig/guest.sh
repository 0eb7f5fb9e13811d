# shellcheck shell=bash disable=SC2016
# Read by rig.sh: writes the guest's side into an initial file system. All decisions are taken here, on the host; the
# guest runs short scripts of busybox: `init` mounts the root, `init2` brings the hardware up and runs `cmd`.
#
# What is quoted singly here is expanded in the guest.

build_guest() {
  local tree=$T/i
  mkdir -p "$tree"/{proc,sys,dev,lower,over,new,mod,rig}
  cp "$KERNELS/busybox" "$tree/busybox"
  choose_modules >"$T/modules"
  xargs -r -a "$T/modules" cp -t "$tree/mod"
  write_init >"$tree/init"; chmod +x "$tree/init"
  ((!RXE)) || { write_ip >"$tree/rig/ip"; write_rdma >"$tree/rig/rdma"; }
  write_init2 >"$tree/rig/init2"
  write_command "$@" >"$tree/rig/cmd"
  (cd "$tree" && find . | cpio --quiet -o -H newc) >"$T/initrd"
  rm -rf "$tree"
}

# The files of the modules that this machine needs, in the order of their dependencies.
choose_modules() {
  local module
  MODULES+=(virtio_pci virtio_console 9p 9pnet_virtio overlay)
  if ((RXE)); then
    MODULES+=(rdma_rxe ib_uverbs rdma_ucm)
    case $NIC in veth) MODULES+=(veth bridge) ;; virtio) MODULES+=(virtio_net) ;; *) MODULES+=("$NIC") ;; esac
  fi
  ((!NVME)) || MODULES+=(nvme)
  case $NVMET in '') ;; loop) MODULES+=(nvmet nvme_loop) ;; *) MODULES+=("nvmet_$NVMET" "nvme_$NVMET") ;; esac
  ((!CXL)) || MODULES+=(cxl_acpi cxl_pci cxl_mem device_dax dax_cxl kmem)
  for module in "${MODULES[@]}"; do
    modprobe -D -d "$KERNELS" -S "$VERSION" "$module" || die "the kernel $VERSION has no module $module"
  done | awk '$1 == "insmod" && !seen[$2]++ {print $2}'
}

# Shared by both scripts of the guest.
write_helpers() {
  cat <<'E'
w() { echo "$1" >"$2"; }
wait_for() {
  i=0
  while ! eval "$1"; do
    i=$((i + 1)); [ $i = 300 ] && { BAD=1; echo "RIG: gave up on: $1"; return; }
    usleep 20000
  done 2>/dev/null
}
P9=trans=virtio,version=9p2000.L,msize=512000
E
}

write_init() {
  local module options
  echo '#!/busybox sh'
  write_helpers
  echo '/busybox mount -t proc proc /proc; mount -t sysfs sys /sys; mount -t devtmpfs dev /dev'
  while read -r module; do
    module=${module##*/} options=
    case $module in nvme.ko*) options="poll_queues=$POLLQ" ;; nvme-core.ko*) options=multipath=N ;; esac
    echo "insmod /mod/$module $options || echo RIG: cannot load $module"
  done <"$T/modules"
  cat <<'E'
mount -t 9p -o $P9,cache=loose,ro rigroot /lower && mount -t tmpfs -o mode=755 over /over && mkdir /over/u /over/w &&
  mount -t overlay -o lowerdir=/lower,upperdir=/over/u,workdir=/over/w over /new || echo RIG: no root
B=/busybox   # from here on /proc is gone, and with it the applets by their bare names
for d in sys dev proc; do $B mount --move /$d /new/$d; done
$B mount -t tmpfs -o mode=755 run /new/run; $B cp -a /rig /busybox /new/run/
exec $B switch_root /new /run/busybox sh /run/rig/init2
E
}

# The kernel measures at boot how fast its processor counts time, and on a busy host is wrong by whole factors now and
# then: its seconds are ten times too long, or too short, and it never looks again. So the machine compares them with
# those of its clock chip, which are the host's, and does not begin where three looks in a row differ by a factor of two.
write_clock_check() {
  cat <<'E'
look() {
  c=/sys/class/rtc/rtc0/since_epoch; read a <$c; b=$a
  while [ $b = $a ]; do usleep 5000; read b <$c; done; read u n </proc/uptime; a=$b
  while [ $b = $a ]; do usleep 5000; read b <$c; done; read v n </proc/uptime
  # Hundredths of ours for each second.
  n=$((((${v%.*} - ${u%.*}) * 100 + 1${v#*.} - 1${u#*.}) / (b - a)))
  [ $n -ge 50 ] && [ $n -le 200 ]
}
(look || look || look || w $n /run/rig/clock) & CLOCK=$!
E
}

write_init2() {
  write_helpers
  cat <<'E'
mkdir -p /dev/pts /dev/shm /dev/mqueue; mount -t devpts devpts /dev/pts
for d in /dev/shm /tmp /var/tmp; do mount -t tmpfs -o mode=1777 tmp $d; done
ln -s /proc/self/fd /dev/fd; ln -s fd/0 /dev/stdin; ln -s fd/1 /dev/stdout; ln -s fd/2 /dev/stderr
mount -t debugfs d /sys/kernel/debug; mount -t cgroup2 cg /sys/fs/cgroup
[ -d /sys/kernel/config ] && mount -t configfs c /sys/kernel/config
hostname rig; ifconfig lo up
E
  write_clock_check
  cat <<'E'
for p in /sys/class/virtio-ports/*; do read n <$p/name; eval "P_$n=/dev/${p##*/}"; done
E
  printf 'mkdir -p %q; mount -t 9p -o $P9,cache=mmap,access=any rigshare %q\n' "$SHARE" "$SHARE"
  printf 'mkdir -p /lib/modules/%s; mount -t 9p -o $P9,cache=loose,ro rigmods /lib/modules/%s\n' "$VERSION" "$VERSION"
  ((!HUGE)) ||
    echo "w $HUGE /proc/sys/vm/nr_hugepages; mkdir -p /dev/hugepages; mount -t hugetlbfs h /dev/hugepages"
  ((!RXE)) || write_nics
  ((!NVME)) || write_drives
  ((!CXL)) || write_cxl
  [[ ! $NVMET ]] || write_fabrics
  cat <<'E'
wait $CLOCK
if [ -e /run/rig/clock ]; then
  read n </run/rig/clock; echo "RIG: a clock that runs at $n % of the host's"; exec poweroff -n -f
fi
read u n </proc/uptime; echo "RIG: ready ${u}s after the kernel started"
if [ "$BAD" ]; then w 125 $P_rc; else /bin/bash /run/rig/cmd </dev/null >$P_out 2>$P_err; w $? $P_rc; fi
sync; exec poweroff -n -f
E
}

# Any rxeI reaches any rxeJ over the wire, although both addresses are local: the local table is asked last, what comes
# from 10.77.0.I leaves by nicI, and who is not bound to an address yet takes a NIC that is not the target's.
write_nics() {
  local i
  echo 'for f in all default; do w 0 /proc/sys/net/ipv4/conf/$f/rp_filter; w 1 /proc/sys/net/ipv4/conf/$f/accept_local
    w 1 /proc/sys/net/ipv4/conf/$f/arp_ignore; w 2 /proc/sys/net/ipv4/conf/$f/arp_announce; done
    w 1 /proc/sys/net/ipv6/conf/default/disable_ipv6'
  [[ $NIC == veth ]] || echo 'for d in /sys/class/net/*; do read m <$d/address; case $m in 52:54:00:77:00:*)
    ip link set ${d##*/} name nic$((0x${m##*:} - 1)) ;; esac; done'
  echo "/usr/sbin/ip -batch /run/rig/ip; rdma -b /run/rig/rdma"
  for ((i = 0; i < RXE; i++)); do echo "wait_for 'grep -q ACTIVE /sys/class/infiniband/rxe$i/ports/1/state'"; done
}

write_ip() {
  local i j mac address table
  echo "rule add pref 1000 lookup local"; echo "rule del pref 0 lookup local"
  [[ $NIC != veth ]] || { echo "link add br0 type bridge"; echo "link set br0 mtu $MTU up"; }
  for ((i = 0; i < RXE; i++)); do
    mac=$(mac_of "$i") address=10.77.0.$((i + 1)) table=$((100 + i))
    if [[ $NIC == veth ]]; then
      echo "link add nic$i mtu $MTU address $mac type veth peer name sw$i mtu $MTU"
      echo "link set sw$i master br0 up"
    else
      echo "link set nic$i mtu $MTU"
    fi
    echo "link set nic$i up"; echo "addr add $address/24 dev nic$i noprefixroute"
    echo "route add local $address dev nic$i table $table"
    echo "route add 10.77.0.0/24 dev nic$i src $address table $table"
    # The kernel's rdma_cm looks in the main table.
    echo "route add 10.77.0.0/24 dev nic$i src $address metric $((i + 1))"
    echo "rule add pref $((10 + i)) iif lo from $address lookup $table"
    ((RXE == 1)) || echo "rule add pref $((100 + i)) iif lo to $address lookup $((i == 0 ? 101 : 100))"
    # Nobody waits for ARP.
    for ((j = 0; j < RXE; j++)); do
      ((i == j)) || echo "neigh add 10.77.0.$((j + 1)) lladdr $(mac_of "$j") dev nic$i nud permanent"
    done
  done
}

write_rdma() {
  local i
  for ((i = 0; i < RXE; i++)); do echo "link add rxe$i type rxe netdev nic$i"; done
}

mac_of() { printf '52:54:00:77:00:%02x' $(($1 + 1)); }

# Controllers are found in any order: /dev/rig/dI is drive I by its serial number, and dIg its character device.
write_drives() {
  local i
  for ((i = 0; i < NVME; i++)); do echo "wait_for '[ -b /dev/nvme${i}n1 ]'"; done
  echo 'mkdir /dev/rig; for d in /sys/class/nvme/nvme*; do read s <$d/serial; n=${d##*/nvme}
    ln -s ../nvme${n}n1 /dev/rig/d${s#rig}; ln -s ../ng${n}n1 /dev/rig/d${s#rig}g; done'
}

write_cxl() {
  local bytes=$((CXL << 20))
  cat <<E
cd /sys/bus/cxl/devices; wait_for "[ -e decoder2.0/mode ]"
w region0 decoder0.0/create_ram_region; w 256 region0/interleave_granularity; w 1 region0/interleave_ways
w ram decoder2.0/mode; w $bytes decoder2.0/dpa_size; w $bytes region0/size; w decoder2.0 region0/target0
w 1 region0/commit; w region0 /sys/bus/cxl/drivers/cxl_region/bind
wait_for "[ -e /sys/bus/dax/drivers/kmem/dax0.0 ]"
# Not movable: what is movable goes to other memory when a device registers it.
for m in /sys/devices/system/memory/memory*/state; do read x <\$m; [ \$x = online ] || w online_kernel \$m; done; cd /
E
}

write_fabrics() {
  local i name target=127.0.0.1 options=,nr_poll_queues=1
  case $NVMET in
    rdma) target=10.77.0.2; options+=,traddr=$target,trsvcid=4420,host_traddr=10.77.0.1 ;;
    tcp) options+=,traddr=$target,trsvcid=4420 ;;
    loop) options='' ;;
  esac
  echo "cd /sys/kernel/config/nvmet; mkdir ports/1; w $NVMET ports/1/addr_trtype"
  [[ $NVMET == loop ]] ||
    echo "w $target ports/1/addr_traddr; w 4420 ports/1/addr_trsvcid; w ipv4 ports/1/addr_adrfam"
  for ((i = 0; i < NVME; i++)); do
    name=nqn.2024-01.rig:d$i
    cat <<E
mkdir subsystems/$name; w 1 subsystems/$name/attr_allow_any_host; mkdir subsystems/$name/namespaces/1
w /dev/rig/d$i subsystems/$name/namespaces/1/device_path; w 1 subsystems/$name/namespaces/1/enable
ln -s \$PWD/subsystems/$name ports/1/subsystems/
w nqn=$name,transport=$NVMET$options /dev/nvme-fabrics; wait_for '[ -b /dev/nvme$((NVME + i))n1 ]'
E
  done
  echo 'cd /'
}

# What runs at the end: the caller's words, as they are.
write_command() {
  local name
  echo 'ulimit -l unlimited; ulimit -n 65536; ulimit -c 0'
  for name in HOME LANG TERM RUST_BACKTRACE RUST_LOG ${VARIABLES[@]+"${VARIABLES[@]}"}; do
    [[ ! ${!name+x} ]] || printf 'export %s=%q\n' "$name" "${!name}"
  done
  printf 'export RIG=1 RIG_NUMA=%s RIG_RXE=%s RIG_NVME=%s RIG_NVMET=%s RIG_CXL=%s RIG_HUGEPAGES=%s PATH=%q\n' \
    "$NUMA" "$RXE" "$NVME" "$NVMET" "$CXL" "$HUGE" "$PATH"
  printf 'cd %q || exit 126\n' "$PWD"
  [[ ! $SETUP ]] || cat "$SETUP"
  printf '\nexec'; printf ' %q' "$@"; echo
}
