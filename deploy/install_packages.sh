#!/usr/bin/env bash
# Installs what Stoker is built and tested with, on Debian 12. Needs root, or sudo.
set -euo pipefail
packages=(
  build-essential ca-certificates ccache clang-format cmake git ninja-build openssl pkg-config python3-venv
  protobuf-compiler protobuf-compiler-grpc libprotobuf-dev libgrpc-dev libgrpc++-dev libabsl-dev libre2-dev libc-ares-dev
  libssl-dev zlib1g-dev libcivetweb-dev prometheus-cpp-dev libgtest-dev libgmock-dev libbenchmark-dev
)
missing=()
for package in "${packages[@]}"; do
  dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null | grep -qx installed || missing+=("$package")
done
[ ${#missing[@]} -eq 0 ] && exit 0
as_root=()
[ "$(id -u)" -eq 0 ] || as_root=(sudo)
"${as_root[@]}" apt-get update -q
"${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends "${missing[@]}"
