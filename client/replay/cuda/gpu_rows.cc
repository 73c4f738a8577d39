#include "client/replay/cuda/gpu_rows.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/replay/cuda/row_kernels.h"
#include "client/replay/host_rows.h"
#include "client/replay/random.h"
#include "kernels/cuda/handles.h"

namespace stoker::replay {
namespace {

using kernels::cuda::CurrentDevice;
using kernels::cuda::DeviceMemory;
using kernels::cuda::EventHandle;
using kernels::cuda::MakeDeviceMemory;
using kernels::cuda::MakePinnedMemory;
using kernels::cuda::PinnedMemory;
using kernels::cuda::StreamHandle;
using kernels::cuda::ToStatus;

// Rows of a step that the host's oracle compares as well, drawn at random: the same one may come twice.
constexpr uint32_t kSampleRows = 64;

// One array on the GPU, and its like in pinned memory.
template <typename T>
struct Mirror {
  absl::Status Make(size_t count) {
    auto on_device = MakeDeviceMemory(count * sizeof(T));
    if (!on_device.ok()) return on_device.status();
    device_memory = *std::move(on_device);
    auto on_host = MakePinnedMemory(count * sizeof(T));
    if (!on_host.ok()) return on_host.status();
    host_memory = *std::move(on_host);
    std::uninitialized_value_construct_n(host(), count);
    return absl::OkStatus();
  }
  T* device() const { return static_cast<T*>(device_memory.get()); }
  T* host() const { return static_cast<T*>(host_memory.get()); }

  DeviceMemory device_memory;
  PinnedMemory host_memory;
};

class GpuRows final : public RowDevice {
 public:
  GpuRows(const RowDeviceSpec& spec, std::shared_ptr<const client::Arena> arena, int ordinal)
      : spec_(spec), oracle_(spec.shape), arena_(std::move(arena)), ordinal_(ordinal), random_(spec.seed) {}
  ~GpuRows() override;
  absl::Status Init();

  uint32_t staging_pieces() const override { return 2; }
  absl::Status Open(const OpenSequence& sequence) override;
  absl::Status FillStaging(const OpenSequence& sequence, uint32_t first, uint32_t count,
                           uint64_t offset_bytes) override;
  absl::Status AwaitStaging() override;
  void WriteNewest(const BatchRow& row) override;
  absl::Span<int32_t> Entries(uint32_t group, size_t row) override {
    return {positions_.host() + EntryOffset(group, row), spec_.top_k};
  }
  absl::Span<int32_t> Names(uint32_t group, size_t row) override {
    return {names().host() + EntryOffset(group, row), spec_.top_k};
  }
  absl::Status Publish(size_t rows) override;
  absl::StatusOr<RowCheck> Check(absl::Span<const BatchRow> batch) override;
  absl::Span<const int32_t> HotRows(uint32_t group, size_t row) const override {
    return {hot_rows_ + EntryOffset(group, row), spec_.top_k};
  }

 private:
  // A row that the host compares as well.
  struct Sample {
    uint32_t group = 0, layer = 0;
    size_t row = 0, entry = 0;
  };

  size_t EntryOffset(uint32_t group, size_t row) const {
    return (group * size_t{spec_.batch_rows} + row) * spec_.top_k;
  }
  const client::HotPartView& Part(uint32_t layer, int part) const {
    return hot_parts_[layer * static_cast<size_t>(spec_.shape.parts()) + static_cast<size_t>(part)];
  }
  DeviceRow RowOf(const BatchRow& row) const;
  RequestTokens TokensOf(const OpenSequence& sequence) const;
  DeviceEntries EntriesOf(size_t rows) const;
  const Mirror<int32_t>& names() const { return spec_.by_pool_row ? pool_rows_ : positions_; }
  // The first `rows` batch rows of all groups.
  cudaError_t UploadEntries(const Mirror<int32_t>& mirror, size_t rows) const;
  absl::Status DescribeParts();
  absl::Status DescribeGroups();
  cudaError_t BeginCheck(absl::Span<const BatchRow> batch);
  cudaError_t BeginSamples(absl::Span<const BatchRow> batch);
  void CheckSamples(absl::Span<const BatchRow> batch, RowCheck* check) const;
  absl::Status DescribeFirstWrong(absl::Span<const BatchRow> batch, uint64_t first, RowCheck* check) const;
  template <typename T>
  cudaError_t Upload(const Mirror<T>& mirror, size_t count) const {
    return cudaMemcpyAsync(mirror.device(), mirror.host(), count * sizeof(T), cudaMemcpyHostToDevice, stream_.get());
  }

  const RowDeviceSpec spec_;
  const RowOracle oracle_;
  const std::shared_ptr<const client::Arena> arena_;
  const int ordinal_;
  Random random_;
  uint32_t grid_limit_ = 1;
  StreamHandle stream_;
  EventHandle hot_rows_there_;
  std::vector<client::HotPartView> hot_parts_;                  // [layer][part], device addresses
  std::vector<client::MatrixView<const int32_t>> hot_rows_of_;  // of each group's mailbox
  absl::Span<std::byte> staging_;
  uint32_t max_hashes_ = 1;
  DeviceMemory hashes_;  // [state row][max_hashes_]
  Mirror<DevicePart> parts_;
  Mirror<DeviceGroup> groups_;
  Mirror<int32_t> positions_;  // [group][batch row][top_k]
  Mirror<int32_t> pool_rows_;  // by_pool_row: likewise
  Mirror<DeviceRow> newest_;
  uint32_t newest_count_ = 0;
  Mirror<DeviceRow> rows_;
  Mirror<CheckTotals> totals_;
  PinnedMemory hot_rows_memory_;
  int32_t* hot_rows_ = nullptr;  // as positions_
  PinnedMemory sample_memory_;
  std::byte* sample_bytes_ = nullptr;  // [kSampleRows][row bytes]
  std::vector<Sample> samples_;
};

GpuRows::~GpuRows() {
  const CurrentDevice current(ordinal_);
  // What is enqueued uses the memory that goes now.
  if (stream_.get() != nullptr) kernels::cuda::ReportLoss(cudaStreamSynchronize(stream_.get()), "the last kernels");
  sample_memory_ = {};
  hot_rows_memory_ = {};
  totals_ = {};
  rows_ = {};
  newest_ = {};
  pool_rows_ = {};
  positions_ = {};
  groups_ = {};
  parts_ = {};
  hashes_ = {};
  hot_rows_there_ = {};
  stream_ = {};
}

absl::Status GpuRows::Init() {
  const CurrentDevice current(ordinal_);
  int multiprocessors = 0;
  if (const cudaError_t error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, ordinal_);
      error != cudaSuccess) {
    return ToStatus(error, "the GPU's size cannot be had");
  }
  grid_limit_ = GridLimit(multiprocessors);
  auto stream = kernels::cuda::MakeStream();
  if (!stream.ok()) return stream.status();
  stream_ = *std::move(stream);
  auto event = kernels::cuda::MakeEvent();
  if (!event.ok()) return event.status();
  hot_rows_there_ = *std::move(event);
  auto staging = arena_->Staging();
  if (!staging.ok()) return staging.status();
  staging_ = *staging;

  max_hashes_ = (spec_.max_sequence_rows + kPrefixBlockRows - 1) / kPrefixBlockRows;
  auto hashes = MakeDeviceMemory(size_t{spec_.state_rows} * max_hashes_ * sizeof(uint64_t));
  if (!hashes.ok()) return hashes.status();
  hashes_ = *std::move(hashes);
  const size_t entries = size_t{spec_.groups()} * spec_.batch_rows * spec_.top_k;
  for (absl::Status status : {positions_.Make(entries), newest_.Make(spec_.batch_rows), rows_.Make(spec_.batch_rows),
                              totals_.Make(1), DescribeParts(), DescribeGroups()}) {
    if (!status.ok()) return status;
  }
  if (spec_.by_pool_row) {
    if (absl::Status status = pool_rows_.Make(entries); !status.ok()) return status;
  }
  auto hot_rows = MakePinnedMemory(entries * sizeof(int32_t));
  if (!hot_rows.ok()) return hot_rows.status();
  hot_rows_memory_ = *std::move(hot_rows);
  hot_rows_ = static_cast<int32_t*>(hot_rows_memory_.get());
  auto samples = MakePinnedMemory(size_t{kSampleRows} * spec_.shape.bytes());
  if (!samples.ok()) return samples.status();
  sample_memory_ = *std::move(samples);
  sample_bytes_ = static_cast<std::byte*>(sample_memory_.get());
  return ToStatus(cudaStreamSynchronize(stream_.get()), "the arena's layout did not come to the GPU");
}

absl::Status GpuRows::DescribeParts() {
  auto views = HotParts(spec_, *arena_);
  if (!views.ok()) return views.status();
  hot_parts_ = *std::move(views);
  const size_t count = size_t{spec_.layers()} * kDeviceParts;
  if (absl::Status status = parts_.Make(count); !status.ok()) return status;
  for (uint32_t layer = 0; layer < spec_.layers(); ++layer) {
    for (int part = 0; part < spec_.shape.parts(); ++part) {
      const client::HotPartView& view = Part(layer, part);
      DevicePart& out = parts_.host()[layer * size_t{kDeviceParts} + static_cast<size_t>(part)];
      if (!std::has_single_bit(view.page_rows()) || view.row_bytes() % 4 != 0 ||
          reinterpret_cast<uintptr_t>(view.data()) % 4 != 0 || view.page_stride_bytes() % 4 != 0 ||
          view.row_stride_bytes() % 4 != 0) {
        return absl::InternalError(absl::StrCat("layer ", layer, " part ", part, ": pages of ", view.page_rows(),
                                                " rows, rows of ", view.row_bytes(), " bytes, strides of ",
                                                view.page_stride_bytes(), " and ", view.row_stride_bytes(),
                                                "; powers of two and multiples of 4 are needed"));
      }
      out.data = reinterpret_cast<char*>(view.data());
      out.page_stride_bytes = view.page_stride_bytes();
      out.row_stride_bytes = view.row_stride_bytes();
      out.page_shift = static_cast<uint32_t>(std::countr_zero(view.page_rows()));
      out.words = static_cast<uint32_t>(view.row_bytes() / 4);
    }
  }
  return ToStatus(Upload(parts_, count), "the layout of the hot cache");
}

absl::Status GpuRows::DescribeGroups() {
  if (absl::Status status = groups_.Make(spec_.groups()); !status.ok()) return status;
  for (uint32_t group = 0; group < spec_.groups(); ++group) {
    auto indices = arena_->Indices(group);
    if (!indices.ok()) return indices.status();
    auto hot_rows = arena_->HotRows(group);
    if (!hot_rows.ok()) return hot_rows.status();
    DeviceGroup& out = groups_.host()[group];
    out.indices = (*indices)[0].data();
    out.hot_rows = (*hot_rows)[0].data();
    out.indices_stride = indices->row_stride_bytes() / sizeof(int32_t);
    out.hot_rows_stride = hot_rows->row_stride_bytes() / sizeof(int32_t);
    out.first_layer = spec_.group_begin[group];
    out.end_layer = spec_.group_begin[group + 1];
    if (indices->rows() < spec_.batch_rows || indices->columns() < spec_.top_k ||
        out.end_layer - out.first_layer > kMaxLayersOfAGroup) {
      return absl::InternalError(absl::StrCat("group ", group, ": a mailbox of ", indices->rows(), " x ",
                                              indices->columns(), " entries for ", out.end_layer - out.first_layer,
                                              " layers; ", spec_.batch_rows, " x ", spec_.top_k,
                                              " entries were asked for"));
    }
    hot_rows_of_.push_back(*hot_rows);
  }
  return ToStatus(Upload(groups_, spec_.groups()), "the layout of the mailbox");
}

RequestTokens GpuRows::TokensOf(const OpenSequence& sequence) const {
  RequestTokens tokens = sequence.request->tokens();
  tokens.hash_ids = static_cast<const uint64_t*>(hashes_.get()) + size_t{sequence.state_row} * max_hashes_;
  return tokens;
}

DeviceRow GpuRows::RowOf(const BatchRow& row) const {
  if (row.sequence == nullptr) return {};
  return {TokensOf(*row.sequence),
          {static_cast<int64_t>(arena_->RegionBegin(row.sequence->state_row)), spec_.hot_rows,
           static_cast<uint32_t>(arena_->newest_row())},
          row.length,
          row.newest_index};
}

DeviceEntries GpuRows::EntriesOf(size_t rows) const {
  DeviceEntries entries;
  entries.groups = groups_.device();
  entries.positions = positions_.device();
  entries.names = names().device();
  entries.group_count = spec_.groups();
  entries.rows = static_cast<uint32_t>(rows);
  entries.max_rows = spec_.batch_rows;
  entries.top_k = spec_.top_k;
  return entries;
}

cudaError_t GpuRows::UploadEntries(const Mirror<int32_t>& mirror, size_t rows) const {
  const size_t pitch = size_t{spec_.batch_rows} * spec_.top_k * sizeof(int32_t);
  return cudaMemcpy2DAsync(mirror.device(), pitch, mirror.host(), pitch, rows * spec_.top_k * sizeof(int32_t),
                           spec_.groups(), cudaMemcpyHostToDevice, stream_.get());
}

absl::Status GpuRows::Open(const OpenSequence& sequence) {
  const std::vector<uint64_t>& ids = sequence.request->hash_ids;
  if (sequence.state_row >= spec_.state_rows || ids.size() > max_hashes_) {
    return absl::InternalError(absl::StrCat("state row ", sequence.state_row, " with ", ids.size(),
                                            " hashes; there are ", spec_.state_rows, " state rows with room for ",
                                            max_hashes_));
  }
  if (ids.empty()) return absl::OkStatus();
  const CurrentDevice current(ordinal_);
  const cudaError_t error =
      cudaMemcpyAsync(static_cast<uint64_t*>(hashes_.get()) + size_t{sequence.state_row} * max_hashes_, ids.data(),
                      ids.size() * sizeof(uint64_t), cudaMemcpyHostToDevice, stream_.get());
  return ToStatus(error, "the hash ids of a request");
}

absl::Status GpuRows::FillStaging(const OpenSequence& sequence, uint32_t first, uint32_t count, uint64_t offset_bytes) {
  const uint64_t bytes = uint64_t{spec_.shape.bytes()} * spec_.layers() * count;
  if (offset_bytes > staging_.size() || bytes > staging_.size() - offset_bytes) {
    return absl::InternalError(
        absl::StrCat(bytes, " bytes at ", offset_bytes, " of a staging area of ", staging_.size()));
  }
  const CurrentDevice current(ordinal_);
  FillArgs args;
  args.tokens = TokensOf(sequence);
  for (int part = 0; part < kDeviceParts; ++part) args.words[part] = spec_.shape.part_bytes[part] / 4;
  args.layers = spec_.layers();
  args.first = first;
  args.count = count;
  args.out = reinterpret_cast<uint32_t*>(staging_.data() + offset_bytes);
  return ToStatus(LaunchFill(args, grid_limit_, stream_.get()), "rows of a prompt");
}

absl::Status GpuRows::AwaitStaging() {
  const CurrentDevice current(ordinal_);
  return ToStatus(cudaStreamSynchronize(stream_.get()), "rows of a prompt");
}

void GpuRows::WriteNewest(const BatchRow& row) { newest_.host()[newest_count_++] = RowOf(row); }

absl::Status GpuRows::Publish(size_t rows) {
  const CurrentDevice current(ordinal_);
  const cudaStream_t stream = stream_.get();
  cudaError_t error = Upload(newest_, newest_count_);
  if (error == cudaSuccess) {
    error = LaunchNewest(parts_.device(), spec_.layers(), newest_.device(), newest_count_, grid_limit_, stream);
  }
  newest_count_ = 0;
  if (error == cudaSuccess) error = UploadEntries(positions_, rows);
  if (error == cudaSuccess && spec_.by_pool_row) error = UploadEntries(pool_rows_, rows);
  if (error == cudaSuccess) error = LaunchEntries(EntriesOf(rows), grid_limit_, stream);
  // The daemon's stream, in another process, does not wait for this one.
  if (error == cudaSuccess) error = cudaStreamSynchronize(stream);
  return ToStatus(error, "the entries of a step");
}

cudaError_t GpuRows::BeginCheck(absl::Span<const BatchRow> batch) {
  const cudaStream_t stream = stream_.get();
  for (uint32_t group = 0; group < spec_.groups(); ++group) {
    const client::MatrixView<const int32_t>& from = hot_rows_of_[group];
    const cudaError_t error = cudaMemcpy2DAsync(hot_rows_ + EntryOffset(group, 0), spec_.top_k * sizeof(int32_t),
                                                from[0].data(), from.row_stride_bytes(), spec_.top_k * sizeof(int32_t),
                                                batch.size(), cudaMemcpyDefault, stream);
    if (error != cudaSuccess) return error;
  }
  cudaError_t error = cudaEventRecord(hot_rows_there_.get(), stream);
  for (size_t row = 0; row < batch.size(); ++row) rows_.host()[row] = RowOf(batch[row]);
  *totals_.host() = {};
  if (error == cudaSuccess) error = Upload(rows_, batch.size());
  if (error == cudaSuccess) error = Upload(totals_, 1);
  if (error == cudaSuccess) {
    error =
        LaunchCheck(parts_.device(), EntriesOf(batch.size()), rows_.device(), totals_.device(), grid_limit_, stream);
  }
  if (error == cudaSuccess) {
    error = cudaMemcpyAsync(totals_.host(), totals_.device(), sizeof(CheckTotals), cudaMemcpyDefault, stream);
  }
  return error;
}

// Copies rows that are drawn at random while the kernel is at work.
cudaError_t GpuRows::BeginSamples(absl::Span<const BatchRow> batch) {
  samples_.clear();
  if (const cudaError_t error = cudaEventSynchronize(hot_rows_there_.get()); error != cudaSuccess) return error;
  for (uint32_t i = 0; i < kSampleRows; ++i) {
    Sample sample;
    sample.group = random_.Below(spec_.groups());
    sample.row = random_.Below(static_cast<uint32_t>(batch.size()));
    sample.entry = random_.Below(spec_.top_k);
    const uint32_t first_layer = spec_.group_begin[sample.group];
    sample.layer = first_layer + random_.Below(spec_.group_begin[sample.group + 1] - first_layer);
    const int32_t position = Entries(sample.group, sample.row)[sample.entry];
    const int32_t hot_row = HotRows(sample.group, sample.row)[sample.entry];
    const DeviceRow row = RowOf(batch[sample.row]);
    // Short sequences have fewer entries than top_k; an impossible answer is found by the kernel, and not followed.
    if (hot_row < 0 || !row.region.CanAnswer(position, row.length, row.newest_index, hot_row)) continue;
    std::byte* out = sample_bytes_ + samples_.size() * spec_.shape.bytes();
    for (int part = 0; part < spec_.shape.parts(); ++part) {
      const absl::Span<std::byte> from = Part(sample.layer, part)[static_cast<size_t>(hot_row)];
      const cudaError_t error = cudaMemcpyAsync(out, from.data(), from.size(), cudaMemcpyDefault, stream_.get());
      if (error != cudaSuccess) return error;
      out += from.size();
    }
    samples_.push_back(sample);
  }
  return cudaSuccess;
}

void GpuRows::CheckSamples(absl::Span<const BatchRow> batch, RowCheck* check) const {
  uint64_t wrong = 0;
  std::string first_wrong;
  for (size_t i = 0; i < samples_.size(); ++i) {
    const Sample& sample = samples_[i];
    const OpenSequence& sequence = *batch[sample.row].sequence;
    const size_t entry = EntryOffset(sample.group, sample.row) + sample.entry;
    const int32_t position = positions_.host()[entry];
    const std::byte* const bytes = sample_bytes_ + i * spec_.shape.bytes();
    if (oracle_.Check(RowOracle::Key(sample.layer, sequence.request->Token(static_cast<uint32_t>(position))), bytes)) {
      continue;
    }
    if (wrong++ == 0) {
      first_wrong = DescribeWrongRow(oracle_, batch[sample.row], sample.row, sample.entry, sample.layer, position,
                                     hot_rows_[entry], absl::MakeConstSpan(bytes, spec_.shape.bytes()));
    }
  }
  check->on_host = samples_.size();
  // Where the kernel found wrong rows these are among them; otherwise it has overlooked them.
  if (check->wrong == 0 && wrong > 0) {
    check->wrong = wrong;
    check->first_wrong = absl::StrCat(first_wrong, " (the kernel took it for right)");
  }
}

absl::Status GpuRows::DescribeFirstWrong(absl::Span<const BatchRow> batch, uint64_t first, RowCheck* check) const {
  const uint64_t place = first / kMaxLayersOfAGroup;
  const size_t entry = place % spec_.top_k, row = place / spec_.top_k % batch.size();
  const uint32_t group = static_cast<uint32_t>(place / spec_.top_k / batch.size());
  const uint32_t layer = spec_.group_begin[group] + static_cast<uint32_t>(first % kMaxLayersOfAGroup);
  const DeviceRow device_row = RowOf(batch[row]);
  const int32_t position = positions_.host()[EntryOffset(group, row) + entry];
  const int32_t hot_row = HotRows(group, row)[entry];
  std::vector<std::byte> bytes;
  if (device_row.region.CanAnswer(position, device_row.length, device_row.newest_index, hot_row)) {
    bytes.resize(spec_.shape.bytes());
    std::byte* out = bytes.data();
    for (int part = 0; part < spec_.shape.parts(); ++part) {
      const absl::Span<std::byte> from = Part(layer, part)[static_cast<size_t>(hot_row)];
      if (absl::Status status = arena_->CopyOut(from, out); !status.ok()) return status;
      out += from.size();
    }
  }
  check->first_wrong = DescribeWrongRow(oracle_, batch[row], row, entry, layer, position, hot_row, bytes);
  return absl::OkStatus();
}

absl::StatusOr<RowCheck> GpuRows::Check(absl::Span<const BatchRow> batch) {
  RowCheck check;
  if (batch.empty()) return check;
  const CurrentDevice current(ordinal_);
  cudaError_t error = BeginCheck(batch);
  if (error == cudaSuccess) error = BeginSamples(batch);
  if (error == cudaSuccess) error = cudaStreamSynchronize(stream_.get());
  if (error != cudaSuccess) return ToStatus(error, "the comparison of a step's rows");
  const CheckTotals& totals = *totals_.host();
  check.on_device = totals.checked;
  check.wrong = totals.wrong;
  if (totals.wrong > 0) {
    if (absl::Status status = DescribeFirstWrong(batch, totals.first, &check); !status.ok()) return status;
  }
  CheckSamples(batch, &check);
  return check;
}

}  // namespace

bool HasGpuRows() { return true; }

absl::StatusOr<std::unique_ptr<RowDevice>> MakeGpuRows(const RowDeviceSpec& spec,
                                                       std::shared_ptr<const client::Arena> arena) {
  cudaPointerAttributes attributes{};
  if (const cudaError_t error = cudaPointerGetAttributes(&attributes, arena->bytes().data()); error != cudaSuccess) {
    return ToStatus(error, "the arena's GPU cannot be had");
  }
  auto rows = std::make_unique<GpuRows>(spec, std::move(arena), attributes.device);
  if (absl::Status status = rows->Init(); !status.ok()) return status;
  return rows;
}

}  // namespace stoker::replay
