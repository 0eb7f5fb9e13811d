# shellcheck shell=bash disable=SC2034
# Read by rig.sh: fetches QEMU and a kernel once, and unpacks them into the cache. The host's own apt sources and
# installed packages stay as they are, but for small tools and libraries that are missing.

APT=()     # options of apt-get: the host's own sources, or those of one suite
UPDATED='' # the suite whose lists are fresh

prepare() {
  local qemu_missing=0 kernel_missing=0
  [ -x "$QEMU" ] || qemu_missing=1
  [ -s "$KERNELS/version" ] || kernel_missing=1
  ((qemu_missing || kernel_missing)) || return 0
  [[ ! ${RIG_QEMU:-} ]] || ((!qemu_missing)) || die "RIG_QEMU names $QEMU, which cannot be run"
  command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null ||
    die "QEMU and a kernel are fetched with apt-get and dpkg-deb, which this host does not have"
  grep -qs '^VERSION_CODENAME=bookworm$' /etc/os-release ||
    die "knows the packages of Debian 12 only; elsewhere run it in a container of that, or fill $CACHE there and copy it"
  mkdir -p "$CACHE" || die "cannot write to $CACHE; RIG_CACHE names another place"
  exec 9>"$CACHE/lock"
  flock -w 900 9 || die "another preparation has held $CACHE/lock for 15 minutes"
  install_tools
  # Somebody else may have done it meanwhile.
  [ -x "$QEMU" ] || prepare_qemu
  [ -s "$KERNELS/version" ] || prepare_kernel
  exec 9>&-
}

# The mirror that this host's own apt uses.
mirror() {
  # shellcheck disable=SC2016
  echo "${RIG_MIRROR:-$(apt-get indextargets --format '$(REPO_URI)' | grep -v -- -security | head -n 1)}"
}

# From here on packages come from this suite of the mirror, with an apt state of its own.
use_suite() {
  local state=$CACHE/apt-$1 from
  [[ $UPDATED == "$1" ]] && return
  from=$(mirror); [[ $from ]] || die "this host's apt has no source; RIG_MIRROR can name a mirror"
  mkdir -p "$state"/{lists/partial,cache/archives/partial}
  echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $from $1 main" >"$state/sources.list"
  APT=(-o Dir::Etc::sourcelist="$state/sources.list" -o Dir::Etc::sourceparts=- -o Dir::State::lists="$state/lists"
    -o Dir::Cache="$state/cache" -o Acquire::Languages=none -o Acquire::IndexTargets::deb::DEP-11::DefaultEnabled=false
    -o APT::Sandbox::User=root -o Acquire::Retries=2 -o Acquire::http::Timeout=30 -o Acquire::https::Timeout=30)
  apt-get "${APT[@]}" -qq -o APT::Update::Error-Mode=any update >&2 || die "cannot read $1 from this host's mirror"
  UPDATED=$1
}

# Downloads packages into a directory, and unpacks nothing.
download() {
  local to=$1; shift
  (cd "$to" && apt-get "${APT[@]}" -qq download "$@" >&2) || die "cannot download $*"
}

# Small programs, and the packages named: from the host's own suite.
install_tools() {
  local missing=() tool
  for tool in busybox:busybox-static modprobe:kmod ip:iproute2 rdma:iproute2 zstd:zstd xz:xz-utils cpio:cpio \
    setpriv:util-linux; do
    command -v "${tool%%:*}" >/dev/null || missing+=("${tool#*:}")
  done
  missing+=("$@")
  ((${#missing[@]})) || return 0
  echo "rig: installing ${missing[*]}" >&2
  DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends "${missing[@]}" >"$CACHE/apt.log" 2>&1 ||
    die "apt-get cannot install ${missing[*]}: $(grep -a '^E:' "$CACHE/apt.log" | head -n 1); see $CACHE/apt.log"
}

# Debian 12's own QEMU 7.2 corrupts guests of several cores now and then (mended in 8.1), so the one of its backports.
prepare_qemu() {
  local new=$CACHE/qemu.new package
  rm -rf "$new"; mkdir -p "$new/debs"
  use_suite bookworm-backports
  download "$new/debs" qemu-system-x86 qemu-system-common qemu-system-data seabios
  for package in "$new"/debs/*.deb; do dpkg-deb -x "$package" "$new"; done
  if ldd "$new/usr/bin/qemu-system-x86_64" | grep -q 'not found'; then
    # shellcheck disable=SC2046
    install_tools $(dpkg-deb -f "$new"/debs/qemu-system-x86_*.deb Depends | tr ',' '\n' | awk '{print $1}' |
      grep -vE '^(qemu|seabios|ipxe)')
  fi
  rm -rf "$new/debs"
  "$new/usr/bin/qemu-system-x86_64" --version >/dev/null || die "QEMU was fetched, and does not run here"
  rm -rf "$CACHE/qemu"; mv "$new" "$CACHE/qemu"
}

prepare_kernel() {
  local new=$KERNELS.new package parts module_tree
  rm -rf "$new"; mkdir -p "$new/debs" "$new/x" "$new/lib/modules"
  case $KERNEL in
    stable) APT=(-o APT::Sandbox::User=root) ;;
    bpo) use_suite bookworm-backports ;;
    new) use_suite trixie-backports ;;
  esac
  package=$(apt-cache "${APT[@]}" depends linux-image-amd64 | awk '/Depends: linux-image-/{print $2; exit}')
  [[ $package ]] || die "there is no kernel package in the lists: run apt-get update first"
  parts=$(apt-cache "${APT[@]}" depends "$package" | awk '/Depends: linux-(base|binary|modules)-[0-9]/{print $2}')
  # shellcheck disable=SC2086
  download "$new/debs" "$package" $parts
  for package in "$new"/debs/*.deb; do dpkg-deb -x "$package" "$new/x"; done
  module_tree=$(find "$new/x" -path '*/lib/modules/*/kernel' -type d | head -n 1)
  module_tree=${module_tree%/kernel}
  VERSION=${module_tree##*/}
  unpack_kernel "$(find "$new/x" -name 'vmlinuz*' -type f | head -n 1)" "$new/vmlinux"
  mv "$module_tree" "$new/lib/modules/$VERSION"
  rm -rf "$new/x" "$new/debs"
  unpack_modules "$new"
  cp "$(command -v busybox)" "$new/busybox"
  echo "$VERSION" >"$new/version"
  rm -rf "$KERNELS"; mv "$new" "$KERNELS"
}

# The kernel inside a bzImage. QEMU starts it directly, so that there is no decompressor to emulate, which saves a second.
unpack_kernel() {
  local image=$1 to=$2 packed=$2.packed
  # The fields of the boot protocol: setup_sects at 497, payload_offset at 584, payload_length at 588.
  field() { od -An "-tu$2" -j "$1" -N "$2" "$image" | tr -d ' '; }
  tail -c +$((($(field 497 1) + 1) * 512 + $(field 584 4) + 1)) "$image" |
    head -c $(($(field 588 4) - 4)) >"$packed" || true
  case $(od -An -tx4 -N4 "$packed") in
    *fd2fb528*) zstd -qdc "$packed" ;;
    *587a37fd*) xz -dc "$packed" ;;
    *) gzip -qdc "$packed" ;;
  esac >"$to" || true
  rm "$packed"
  [[ $(od -An -tx4 -N4 "$to") == *464c457f* ]] || die "$image holds no kernel that can be unpacked here"
}

# Modules that a machine is likely to load are unpacked here, where it is quick.
unpack_modules() {
  depmod -b "$1" "$VERSION"
  { modprobe -a -D -d "$1" -S "$VERSION" virtio_pci virtio_console 9p 9pnet_virtio overlay virtio_net virtio_blk veth \
    dummy bridge sch_netem sch_tbf rdma_rxe ib_uverbs rdma_ucm nvme nvme_tcp nvme_rdma nvme_loop nvmet nvmet_tcp \
    nvmet_rdma null_blk brd loop ext4 xfs ublk_drv cxl_acpi cxl_pci cxl_mem device_dax kmem dax_cxl dax_hmem tun tls \
    2>/dev/null || true; } | awk '$1 == "insmod" && $2 ~ /\.xz$/ {print $2}' | sort -u | xargs -r xz -d
  depmod -b "$1" "$VERSION"
}
