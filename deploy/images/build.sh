#!/usr/bin/env bash
# Makes a container image of built programs: Debian's libraries that they link and no more, as an OCI layout and as a folder.
# Nothing but Debian's packages is downloaded. Needs root and the packages of the group `image`.
#   deploy/images/build.sh --bin build/dev/bin --output build/images/cpu
#   deploy/images/build.sh --bin build/cuda/bin --cuda /usr/local/cuda/lib64 --output build/images/cuda
# The same programs and packages give the same digest: times are SOURCE_DATE_EPOCH, by default that of the last commit.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

usage() {
  cat >&2 <<'TEXT'
usage: deploy/images/build.sh --bin DIR --output DIR [options]
  --bin DIR       programs: ravel-coordinator, ravel-store, ravel-worker, ravel-trainer, ravelctl
  --output DIR    gets root/ (the file system), oci/ (the image, tag as below) and sbom.spdx.json; must not exist, or be one of these
  --cuda DIR      also libravel_cuda.so of --bin, and cuBLASLt, cuDNN, NCCL and NVRTC of this folder, a toolkit's lib64
  --tag TAG       of the image (default: the version of the programs)
TEXT
  exit 2
}

bin='' output='' cuda='' tag=''
while [[ $# -gt 0 ]]; do
  case $1 in
    --bin) bin=${2:-} ;;
    --output) output=${2:-} ;;
    --cuda) cuda=${2:-} ;;
    --tag) tag=${2:-} ;;
    *) usage ;;
  esac
  shift 2 || usage
done
[[ -n $bin && -n $output ]] || usage
die() {
  echo "build.sh: $*" >&2
  exit 1
}
programs=(ravel-coordinator ravel-store ravel-worker ravel-trainer ravelctl)
for program in "${programs[@]}"; do
  [[ -x $bin/$program ]] || die "--bin: no program $bin/$program; build it first"
done
[[ $(id -u) == 0 ]] || die "needs root: mmdebstrap makes files of root"
for tool in mmdebstrap umoci strip jq python3; do
  command -v "$tool" >/dev/null || die "no $tool; deploy/install_packages.sh image"
done
if [[ -e $output ]]; then
  [[ -d $output/oci && -d $output/root ]] || die "--output: $output is there and is no image of this script"
  rm -rf "$output"
fi
mkdir -p "$output"
output=$(cd "$output" && pwd)
root=$output/root
# 10001: a number that no host uses, so that nobody there is this user.
user=10001
tag=${tag:-$("$bin/ravel-worker" --version | awk '{ print $NF }')}
[[ $tag =~ ^[A-Za-z0-9_][A-Za-z0-9._-]{0,127}$ && $tag != latest ]] || die "--tag: not a tag, or latest: '$tag'"
epoch=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2>/dev/null || date +%s)}

# Packages of the shared libraries that the programs link. Those of a merged /usr are known by either path.
owners_of() {
  local path
  while read -r path; do
    dpkg-query -S "$path" 2>/dev/null || dpkg-query -S "${path#/usr}" 2>/dev/null || dpkg-query -S "/usr$path" 2>/dev/null ||
      die "no package has $path"
  done | sed 's/:.*//' | sort -u
}
mapfile -t packages < <(for program in "${programs[@]}"; do ldd "$bin/$program"; done |
  awk '$3 ~ /^\// { print $3 }' | sort -u | xargs -n1 readlink -f | owners_of)
# base-files: the release; the others: a shell for people and probes.
packages+=(base-files coreutils dash)

echo "== $((${#packages[@]})) packages and what they need"
release=$(. /etc/os-release && echo "$VERSION_CODENAME")
# The packages are only unpacked, so dpkg's status is empty. What each brought is kept where scanners look in images without dpkg:
# status.d/NAME, and NAME.md5sums of its files.
# shellcheck disable=SC2016  # expanded by the hook
keep_control='
  mkdir -p "$1/var/lib/dpkg/status.d"
  for package in "$1"/var/cache/apt/archives/*.deb; do
    kept=$1/var/lib/dpkg/status.d/$(dpkg-deb -f "$package" Package)
    dpkg-deb -f "$package" >"$kept"
    dpkg-deb -I "$package" md5sums >"$kept.md5sums"
  done'
SOURCE_DATE_EPOCH=$epoch mmdebstrap --quiet --mode=root --variant=extract --aptopt='Acquire::Retries "5"' --extract-hook="$keep_control" \
  --include="$(IFS=,; echo "${packages[*]}")" "$release" "$root"

echo "== programs"
# Documents, locales and developers' halves are left out; licences stay.
find "$root/usr/share/doc" -type f ! -name copyright -delete
find "$root/usr/share/doc" -mindepth 2 -type l -delete
rm -rf "$root"/usr/share/{man,info,locale,zoneinfo,lintian,bug,bash-completion,i18n} "$root"/usr/lib/x86_64-linux-gnu/gconv \
  "$root"/usr/lib/x86_64-linux-gnu/{libgrpc*unsecure,libprotoc}* "$root"/var/{cache,log,lib/apt} "$root"/{boot,home,media,mnt,opt,srv}
find "$root/var/lib/dpkg" -mindepth 1 -maxdepth 1 ! -name status.d -exec rm -rf {} +
# Nobody changes users inside.
find "$root" -xdev ! -type l -perm /6000 -exec chmod a-s {} +
find "$root" -xdev -type d -empty -path '*/usr/share/*' -delete
mkdir -p "$root"/{var/log,var/lib/ravel,run,tmp,proc,sys,dev} "$root/usr/share/ravel"
for program in "${programs[@]}"; do
  strip -o "$root/usr/bin/$program" "$bin/$program"
done
ln -s ravelctl "$root/usr/bin/kubectl-ravel"  # kubectl ravel ...
install -m 755 deploy/images/ravel-pool.sh "$root/usr/bin/ravel-pool"
libraries='{}'  # of --cuda, for the SBOM
if [[ -n $cuda ]]; then
  [[ -f $bin/libravel_cuda.so ]] || die "--bin: no libravel_cuda.so beside the programs"
  strip --strip-unneeded -o "$root/usr/bin/libravel_cuda.so" "$bin/libravel_cuda.so"
  libraries=$(python3 -B deploy/images/cuda_libraries.py "$cuda" "$root")
  # Container runtimes that bring a driver's libraries run the host's ldconfig, which need not know Debian's folders.
  echo 'include /etc/ld.so.conf.d/*.conf' >"$root/etc/ld.so.conf"
fi
printf 'root:x:0:0:root:/root:/usr/sbin/nologin\nravel:x:%s:%s:Ravel:/var/lib/ravel:/usr/sbin/nologin\n' $user $user >"$root/etc/passwd"
printf 'root:x:0:\nravel:x:%s:\n' $user >"$root/etc/group"
rm -f "$root"/etc/{shadow,gshadow,hostname,resolv.conf} "$root"/etc/*-
chmod 1777 "$root/tmp"
chown $user:$user "$root/var/lib/ravel"

# Software bill of materials: SPDX 2.3, a package per Debian package that was unpacked, per library of --cuda, and this one.
version=$("$bin/ravel-worker" --version | awk '{ print $NF }')
created=$(date -u -d "@$epoch" +%Y-%m-%dT%H:%M:%SZ)
{
  for control in "$root"/var/lib/dpkg/status.d/*; do
    [[ $control == *.md5sums ]] || awk '{ sub(":$", "", $1) } $1 == "Package" || $1 == "Version" { of[$1] = $2 }
      END { print of["Package"], of["Version"], "Organization: Debian" }' "$control"
  done
} | LC_ALL=C sort | jq -Rn --arg version "$version" --arg created "$created" --slurpfile cuda <(echo "$libraries") '
  ([inputs | split(" ") | {name: .[0], versionInfo: .[1], supplier: (.[2:] | join(" "))}] + ($cuda[0].packages // [])) as $packages |
  {spdxVersion: "SPDX-2.3", dataLicense: "CC0-1.0", SPDXID: "SPDXRef-DOCUMENT", name: "ravel",
   documentNamespace: "urn:ravel:image:\($version)", creationInfo: {created: $created, creators: ["Tool: deploy/images/build.sh"]},
   packages: ([{name: "ravel", versionInfo: $version, supplier: "NOASSERTION"}] + $packages | map(. + {
     SPDXID: ("SPDXRef-" + (.name | gsub("[^A-Za-z0-9.-]"; "-"))), downloadLocation: "NOASSERTION", filesAnalyzed: false}))} +
  if $cuda[0].licences then {hasExtractedLicensingInfos: $cuda[0].licences} else {} end' >"$output/sbom.spdx.json"
cp "$output/sbom.spdx.json" "$root/usr/share/ravel/"

echo "== image"
layer=$output/layer.tar
find "$root" -xdev -newermt "@$epoch" -exec touch -h -d "@$epoch" {} +
tar --sort=name --mtime="@$epoch" --numeric-owner --pax-option=delete=atime,delete=ctime --format=posix -C "$root" -cf "$layer" .
umoci init --layout "$output/oci"
umoci new --image "$output/oci:$tag"
history=(--history.created "$created" --history.author Ravel)
umoci raw add-layer --image "$output/oci:$tag" "${history[@]}" --history.created_by "deploy/images/build.sh" "$layer"
umoci config --image "$output/oci:$tag" "${history[@]}" --created "$created" --author Ravel --os linux --architecture amd64 \
  --config.user $user:$user --config.workingdir /var/lib/ravel --config.env PATH=/usr/bin:/bin --config.env HOME=/var/lib/ravel \
  --config.label org.opencontainers.image.title=ravel --config.label "org.opencontainers.image.version=$version" \
  --config.label "org.opencontainers.image.revision=$(git rev-parse HEAD 2>/dev/null || echo unknown)" \
  --config.label "org.opencontainers.image.created=$created"
umoci gc --layout "$output/oci"
rm "$layer"
manifest=$(jq -r '.manifests[0].digest' "$output/oci/index.json")
echo "image $output/oci:$tag"
echo "digest $manifest"
echo "size $(du -sb "$root" | awk '{ printf "%.1f MB", $1 / 1e6 }') unpacked, $(du -sb "$output/oci" | awk '{ printf "%.1f MB", $1 / 1e6 }') compressed"
