#!/usr/bin/env bash
# Installs the Debian/Ubuntu packages that kvlab needs, or prints the exact command and stops with exit 69.
set -eu
packages="build-essential pkg-config libhdf5-dev hdf5-tools zlib1g-dev libopenblas-dev libcriterion-dev gnuplot-nox fonts-dejavu-core libjansson-dev libinih-dev libxxhash-dev librandom123-dev"
missing=""
for p in $packages; do
    dpkg-query -W -f='${Status}' "$p" 2>/dev/null | grep -q '^install ok installed' || missing="$missing $p"
done
[ -n "$missing" ] || exit 0
install="apt-get install -y --no-install-recommends$missing"
if ! command -v apt-get >/dev/null; then
    echo "kvlab needs these packages (Debian names):$missing" >&2
    exit 69
fi
if [ "$(id -u)" = 0 ]; then
    sudo=""
elif command -v sudo >/dev/null && sudo -n true 2>/dev/null; then
    sudo="sudo -n"
else
    echo "kvlab needs more packages and cannot install them here. Run this, then make again:" >&2
    echo "    sudo $install" >&2
    exit 69
fi
echo "installing:$missing" >&2
$sudo apt-get update -qq
DEBIAN_FRONTEND=noninteractive $sudo $install >/dev/null
