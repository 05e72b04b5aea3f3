#!/bin/sh
# Makes the images that bench/repo_tasks.toml begins with, for Docker, without a registry:
#   repo-python:1  Debian 12 with Python, pytest and patch
#   repo-musl:1    busybox and a C compiler (tcc) over musl: no glibc to link with, no Python, no make
# Run it as root on Debian 12. It needs mmdebstrap, busybox-static, musl-tools, dpkg-dev, gcc, make.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
account='agent:x:1000:1000::/home/agent:/bin/sh'

mmdebstrap --variant=essential --include=python3,python3-pytest,patch \
  --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/locale/*' \
  --customize-hook="rm -rf \"\$1\"/var/lib/apt/lists \"\$1\"/var/cache/apt; echo $account >> \"\$1\"/etc/passwd" \
  --customize-hook='echo agent:x:1000: >> "$1"/etc/group' \
  --customize-hook='mkdir "$1"/home/agent; chown 1000:1000 "$1"/home/agent' bookworm "$folder/python.tar"
docker import "$folder/python.tar" repo-python:1

cd "$folder"
mkdir lists
mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' | grep -v security | head -n 1)
echo "deb-src $mirror bookworm main" > sources.list
apt="apt-get -o Dir::Etc::sourcelist=$folder/sources.list -o Dir::Etc::sourceparts=- -o Dir::State::lists=$folder/lists"
$apt update
$apt source --download-only tcc
mkdir tcc
tar -xf tcc_*.orig.tar.* -C tcc
(
  cd tcc
  ./configure --cc=musl-gcc --config-musl --prefix=/usr --extra-ldflags=-static --elfinterp=/lib/ld-musl-x86_64.so.1 \
    --sysincludepaths='{B}/include:/usr/include' --libpaths='/usr/lib:{B}' --crtprefix=/usr/lib
  make tcc
  make libtcc1.a || [ -s libtcc1.a ] # what else it makes is for bounds checks and needs glibc's headers
)
mkdir -p root/bin root/lib root/tmp root/etc root/root root/home/agent root/usr/bin root/usr/lib/tcc
chmod 1777 root/tmp
chown 1000:1000 root/home/agent
printf '%s\n' root:x:0:0::/root:/bin/sh "$account" > root/etc/passwd
printf '%s\n' root:x:0: agent:x:1000: > root/etc/group
cp /bin/busybox root/bin
for name in $(busybox --list); do ln -s busybox "root/bin/$name" 2>/dev/null || true; done
cp /usr/lib/x86_64-linux-musl/*.o /usr/lib/x86_64-linux-musl/*.a /usr/lib/x86_64-linux-musl/libc.so root/usr/lib
cp /usr/lib/x86_64-linux-musl/libc.so root/lib/ld-musl-x86_64.so.1
cp -r /usr/include/x86_64-linux-musl root/usr/include
cp -r tcc/libtcc1.a tcc/include root/usr/lib/tcc
cp tcc/tcc root/usr/bin/tcc
ln -s tcc root/usr/bin/cc
tar -C root -c . | docker import - repo-musl:1
