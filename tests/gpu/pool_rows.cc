#include "tests/gpu/pool_rows.h"

#include <cstdio>
#include <cstring>
#include <vector>

#include "tests/kernels/backends.h"

namespace stoker::kernels::cuda {
namespace {

constexpr int32_t kRowBytes = 656;
constexpr size_t kWords = kRowBytes / sizeof(uint32_t);
constexpr size_t kMiB = size_t{1} << 20;
constexpr size_t kGiB = size_t{1} << 30;

std::vector<int32_t> RowsOf(size_t bytes) {
  std::vector<int32_t> rows;
  for (size_t at = 0; at + 2 * kRowBytes <= bytes; at += kMiB) {
    // A GiB is no multiple of the row: the row before its begin lies across it.
    if (at > 0 && at % kGiB == 0) rows.push_back(static_cast<int32_t>(at / kRowBytes));
    rows.push_back(static_cast<int32_t>(at / kRowBytes + 1));
  }
  return rows;
}

uint32_t WordOf(int32_t row, size_t word) {
  return static_cast<uint32_t>(row) * 2654435761u ^ static_cast<uint32_t>(word) * 40503u;
}

}  // namespace

void WriteRows(std::byte* pool, size_t bytes) {
  for (const int32_t row : RowsOf(bytes)) {
    uint32_t words[kWords];
    for (size_t i = 0; i < kWords; ++i) words[i] = WordOf(row, i);
    std::memcpy(pool + int64_t{row} * kRowBytes, words, kRowBytes);
  }
}

int64_t CountWrongRows(Backend& backend, std::byte* pool, size_t bytes) {
  const std::vector<int32_t> rows = RowsOf(bytes);
  const auto count = static_cast<int32_t>(rows.size());
  std::vector<int32_t> hot_rows(rows.size());
  for (int32_t i = 0; i < count; ++i) hot_rows[i] = i;
  const auto stream = backend.CreateStream().value();
  const auto device_rows = backend.AllocatePrivate(rows.size() * sizeof(int32_t)).value();
  const auto device_hot_rows = backend.AllocatePrivate(rows.size() * sizeof(int32_t)).value();
  const auto device_count = backend.AllocatePrivate(sizeof(int32_t)).value();
  const auto hot = backend.AllocatePrivate(rows.size() * kRowBytes).value();
  const auto layout = [](int64_t row_count) {
    return RowLayout::Make({RowLayoutKind::kLinear, kRowBytes}, row_count).value();
  };
  const int32_t layer = 0;
  GatherCompactArgs args;
  args.pool_rows = static_cast<int64_t>(bytes / kRowBytes);
  args.pool = {pool, 0, 1, layout(args.pool_rows)};
  args.hot = {hot->data(), 0, 1, layout(count)};
  args.hot_rows = count;
  args.layers = &layer;
  args.layer_count = 1;
  args.miss_pool_rows = reinterpret_cast<const int32_t*>(device_rows->data());
  args.miss_hot_rows = reinterpret_cast<const int32_t*>(device_hot_rows->data());
  args.miss_counts = reinterpret_cast<const int32_t*>(device_count->data());
  args.rows = 1;
  args.top_k = count;
  std::vector<uint32_t> got(rows.size() * kWords, 0xdeadbeef);
  for (const absl::Status& status :
       {stream->Copy(device_rows->data(), rows.data(), rows.size() * sizeof(int32_t)),
        stream->Copy(device_hot_rows->data(), hot_rows.data(), rows.size() * sizeof(int32_t)),
        stream->Copy(device_count->data(), &count, sizeof count), stream->Gather(args),
        stream->Copy(got.data(), hot->data(), rows.size() * kRowBytes), Finish(*stream)}) {
    if (status.ok()) continue;
    std::fprintf(stderr, "gather from a pool: %s\n", status.ToString().c_str());
    return -1;
  }
  int64_t wrong = 0;
  for (int32_t r = 0; r < count; ++r) {
    bool right = true;
    for (size_t i = 0; i < kWords; ++i) right = right && got[r * kWords + i] == WordOf(rows[r], i);
    wrong += !right;
  }
  return wrong;
}

}  // namespace stoker::kernels::cuda
