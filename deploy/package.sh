#!/usr/bin/env bash
# Makes one relocatable folder of stripped programs from a release build: what Debian ships no archive of lies beside them.
#
#   deploy/package.sh BUILD_DIR OUT_DIR
set -euo pipefail
build=$1
out=$2
rm -rf "$out"
mkdir -p "$out"
for program in stokerd stokerctl stoker-replay; do
  strip -o "$out/$program" "$build/bin/$program"
done
# Everything that is neither glibc nor the compiler's runtime travels along.
for program in "$out"/*; do
  ldd "$program" | awk '$3 ~ /^\// {print $1, $3}'
done | sort -u | while read -r name path; do
  case "$name" in
    libc.so.* | libm.so.* | libpthread.so.* | libdl.so.* | librt.so.* | ld-linux*) ;;
    *) install -m 0755 "$path" "$out/$name" && strip "$out/$name" ;;
  esac
done
du -sh "$out"
