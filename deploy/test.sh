#!/usr/bin/env bash
# Installs what is needed, builds, and passes all tests that need no GPU: format and wire-contract checks, the optimised
# build with every test, the sanitizer builds with the tests that they slow least, and the relocatable release.
#
#   deploy/test.sh [STAGE ...]      stages: lint ci asan tsan release; none: all
#
# STOKER_SHARED, where set, is a folder with traces/conversation_trace.jsonl and golden/: tests that can use real data do.
set -euo pipefail
cd "$(dirname "$0")/.."
jobs=$(nproc)

stage_lint() {
  git ls-files '*.cc' '*.h' '*.cu' '*.cuh' | xargs clang-format --dry-run --Werror
  if [ ! -x build/venv/bin/buf ]; then
    python3 -m venv build/venv
    build/venv/bin/pip install --quiet buf-bin==1.75.0
  fi
  build/venv/bin/buf lint
  # The contract may grow, not break, against what was released last.
  local released
  released=$(git describe --tags --abbrev=0 --match 'v*' 2>/dev/null || true)
  if [ -n "$released" ]; then build/venv/bin/buf breaking --against ".git#tag=$released"; fi
}

build_and_test() {
  local preset=$1
  shift
  cmake --preset "$preset"
  cmake --build --preset "$preset" --parallel "$jobs"
  ctest --preset "$preset" "$@"
}

stage_ci() { build_and_test ci; }
# The programs that do not link gRPC, and the daemon itself, built with a sanitizer; the daemon is then driven by the system tests of
# the ci stage (which must have been built). Load and trace tests are about time: here they would measure the sanitizer. Debian's gRPC
# is not instrumented, so ThreadSanitizer takes what it does for races: a client under it says nothing, and what is built with it has
# tests/tsan.supp.
sanitize() {
  local preset=$1
  shift
  local tests=(block_allocator_test pool_model_test pool_spec_test pool_test pool_threads_test pool_trace_test
    pool_words_test pool_write_test prefix_index_test kernels_checks_test kernels_plane_test kernels_resolve_test
    kernels_rows_test kernels_streams_test
    descriptor_socket_test listen_socket_test log_test metrics_test pool_meter_test config_test device_choice_test
    bounce_memory_test copy_policy_test engine_arena_sharing_test session_order_test session_tensors_test session_threads_test tensor_registry_test tensor_test "$@")
  cmake --preset "$preset"
  cmake --build --preset "$preset" --parallel "$jobs" --target stokerd bounced_daemon "${tests[@]}"
  local pattern
  pattern=$(IFS='|' && printf '^(%s)$' "${tests[*]}")
  env -u STOKER_SHARED ctest --preset "$preset" -R "$pattern"
  STOKER_TEST_DAEMON="$PWD/build/$preset/bin/stokerd" \
    STOKER_TEST_BOUNCED_DAEMON="$PWD/build/$preset/bin/bounced_daemon" \
    ctest --preset ci -L system -E 'replay|load_test'
}
stage_asan() { sanitize asan client_test plane_memory_test; }
stage_tsan() { sanitize tsan; }

stage_release() {
  cmake --preset release
  cmake --build --preset release --parallel "$jobs"
  deploy/package.sh build/release build/stoker
  deploy/check_package.sh build/stoker
}

deploy/install_packages.sh
stages=("$@")
[ ${#stages[@]} -gt 0 ] || stages=(lint ci asan tsan release)
for stage in "${stages[@]}"; do
  printf '\n== %s ==\n' "$stage"
  "stage_$stage"
done
printf '\nall stages passed: %s\n' "${stages[*]}"
