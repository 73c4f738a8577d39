// Thread-safe: touches nothing but the pieces.
//
// Rows of a gather are scattered, so a plain loop waits for memory at each row's first lines. The source lines of a
// later piece are prefetched while the present one is copied.
#include "kernels/cpu/copy_rows.h"

#include <algorithm>
#include <cstring>

namespace stoker::kernels::cpu {
namespace {

constexpr int64_t kLineBytes = 64;
// Bytes in flight ahead of the copy. Measured with rows of 656 bytes on an EPYC core: one row ahead is slower than
// four, eight are no faster.
constexpr int64_t kAheadBytes = 2560;
// A longer piece is streamed by the hardware's own prefetcher once it has begun.
constexpr int64_t kMaxPrefetchBytes = 2048;

struct Block16 {
  uint64_t half[2];
};

void CopySmall(std::byte* dst, const std::byte* src, int64_t bytes) {
  if (bytes % 16 != 0 || bytes > kMaxPrefetchBytes) {
    std::memcpy(dst, src, bytes);
    return;
  }
  for (int64_t i = 0; i < bytes; i += 16) {
    Block16 block;
    std::memcpy(&block, src + i, 16);
    std::memcpy(dst + i, &block, 16);
  }
}

void Prefetch(const std::byte* src, int64_t bytes) {
  const int64_t end = std::min(bytes, kMaxPrefetchBytes);
  for (int64_t i = 0; i < end; i += kLineBytes) __builtin_prefetch(src + i, 0, 3);
}

}  // namespace

void CopyPieces(std::byte* dst, const std::byte* src, absl::Span<const PieceCopy> pieces) {
  const size_t count = pieces.size();
  if (count == 0) return;
  const size_t ahead = std::clamp<int64_t>(kAheadBytes / std::max<int64_t>(pieces[0].bytes, 1), 1, 32);
  for (size_t i = 0; i < std::min(ahead, count); ++i) Prefetch(src + pieces[i].src, pieces[i].bytes);
  for (size_t i = 0; i < count; ++i) {
    if (i + ahead < count) Prefetch(src + pieces[i + ahead].src, pieces[i + ahead].bytes);
    const PieceCopy& piece = pieces[i];
    if (dst + piece.dst != src + piece.src) CopySmall(dst + piece.dst, src + piece.src, piece.bytes);
  }
}

}  // namespace stoker::kernels::cpu
