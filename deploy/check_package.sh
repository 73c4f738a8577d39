#!/usr/bin/env bash
# Checks that a folder made by package.sh is complete and can be moved: every library comes from the folder itself or is
# glibc's, nothing names a path of this machine, and a replay through the packaged daemon is right.
#
#   deploy/check_package.sh DIR
set -euo pipefail
moved=$(mktemp -d)
trap 'rm -rf "$moved"' EXIT
cp -r "$1" "$moved/elsewhere"
cd "$moved/elsewhere"
for program in stokerd stokerctl stoker-replay; do
  outside=$(ldd "$program" | awk '$3 ~ /^\// {print $3}' | grep -v "^$PWD/" |
    grep -vE '/(libc|libm|libpthread|libdl|librt)\.so\.[0-9]+$' || true)
  if [ -n "$outside" ]; then
    printf '%s needs libraries that are not in the folder:\n%s\n' "$program" "$outside" >&2
    exit 1
  fi
  if readelf -d "$program" | grep -E 'R(UN)?PATH' | grep -vF '[$ORIGIN]'; then
    printf '%s has a run path that is not $ORIGIN\n' "$program" >&2
    exit 1
  fi
  env -i "./$program" --version
done
env -i TMPDIR="$moved" ./stoker-replay --requests 20
