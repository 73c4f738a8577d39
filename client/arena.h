// Arena: the session's memory, mapped into this process, and typed views of its tensors.
//
// Thread safety: an Arena is immutable; the memory behind its views is shared with the daemon. The engine writes
// indices and hot rows before it calls Step, and reads hot rows and misses after the reply; in between it leaves them
// alone. On the server plane doorbells take the place of call and reply: see PlaneMail.
//
// Invariants:
//  1. Every byte that a view can reach lies inside the mapping: the layout is checked once, with overflow-checked
//     arithmetic, against size_bytes and against the descriptor's real size, before any of it is used.
//  2. Rows of a view are dense, elements are aligned, and no two dense tensors overlap.
//  3. Views do not own: they end with the last shared_ptr to their Arena.
//
// An arena on a GPU, on_device(), has views of device addresses: for kernels and cudaMemcpyAsync, not for host code,
// which uses CopyIn and CopyOut. Only ArenaMapping::kDevice gives one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "client/device_mapping.h"
#include "stoker/v1/pools.pb.h"
#include "stoker/v1/sessions.pb.h"

namespace stoker::client {

// Owns a file descriptor.
class FileDescriptor {
 public:
  FileDescriptor() = default;
  explicit FileDescriptor(int value) : value_(value) {}
  ~FileDescriptor();
  FileDescriptor(FileDescriptor&& other) noexcept : value_(other.Release()) {}
  FileDescriptor& operator=(FileDescriptor&& other) noexcept;

  int get() const { return value_; }
  bool valid() const { return value_ >= 0; }
  int Release() {
    const int value = value_;
    value_ = -1;
    return value;
  }

 private:
  int value_ = -1;
};

// Views a matrix whose rows are dense and row_stride bytes apart.
template <typename T>
class MatrixView {
 public:
  MatrixView() = default;
  MatrixView(std::byte* data, size_t rows, size_t columns, size_t row_stride_bytes)
      : data_(data), rows_(rows), columns_(columns), row_stride_bytes_(row_stride_bytes) {}

  size_t rows() const { return rows_; }
  size_t columns() const { return columns_; }
  size_t row_stride_bytes() const { return row_stride_bytes_; }
  // `row` below rows(): not checked.
  absl::Span<T> operator[](size_t row) const {
    return absl::Span<T>(reinterpret_cast<T*>(data_ + row * row_stride_bytes_), columns_);
  }

 private:
  std::byte* data_ = nullptr;
  size_t rows_ = 0;
  size_t columns_ = 0;
  size_t row_stride_bytes_ = 0;
};

// Views one part of one layer's hot cache: hot row r is at page r / page_rows, row r % page_rows.
class HotPartView {
 public:
  HotPartView() = default;
  HotPartView(std::byte* data, size_t rows, size_t row_bytes, size_t page_rows, size_t page_stride_bytes,
              size_t row_stride_bytes)
      : data_(data),
        rows_(rows),
        row_bytes_(row_bytes),
        page_rows_(page_rows),
        page_stride_bytes_(page_stride_bytes),
        row_stride_bytes_(row_stride_bytes) {}

  size_t rows() const { return rows_; }
  size_t row_bytes() const { return row_bytes_; }
  // What a kernel needs to do the same.
  std::byte* data() const { return data_; }
  size_t page_rows() const { return page_rows_; }
  size_t page_stride_bytes() const { return page_stride_bytes_; }
  size_t row_stride_bytes() const { return row_stride_bytes_; }
  // `hot_row` below rows(): not checked.
  absl::Span<std::byte> operator[](size_t hot_row) const {
    return absl::Span<std::byte>(
        data_ + hot_row / page_rows_ * page_stride_bytes_ + hot_row % page_rows_ * row_stride_bytes_, row_bytes_);
  }

 private:
  std::byte* data_ = nullptr;
  size_t rows_ = 0;
  size_t row_bytes_ = 0;
  size_t page_rows_ = 1;
  size_t page_stride_bytes_ = 0;
  size_t row_stride_bytes_ = 0;
};

// Views elements that may lie apart.
template <typename T>
class StridedView {
 public:
  StridedView() = default;
  StridedView(std::byte* data, size_t size, size_t stride_bytes)
      : data_(data), size_(size), stride_bytes_(stride_bytes) {}

  size_t size() const { return size_; }
  // What a kernel needs to do the same as operator[].
  std::byte* data() const { return data_; }
  size_t stride_bytes() const { return stride_bytes_; }
  // `i` below size(): not checked.
  T& operator[](size_t i) const { return *reinterpret_cast<T*>(data_ + i * stride_bytes_); }

 private:
  std::byte* data_ = nullptr;
  size_t size_ = 0;
  size_t stride_bytes_ = 0;
};

// Views what the engine and the server plane tell each other beside entries, hot rows and misses (ArenaLayout in
// sessions.proto). Doorbell g is of group g, the last one of the commits. Doorbells and `ended` are for atomic
// operations: `request` is stored with release order when what it announces is written, `done` loaded with acquire
// order before what it announces is read. ServerPlane (server_plane.h) does so in host memory.
struct PlaneMail {
  StridedView<uint64_t> request;     // [groups + 1]
  StridedView<const uint64_t> done;  // [groups + 1]
  const int32_t* ended = nullptr;    // v1::PlaneEnd
  int32_t* batch_rows = nullptr;
  // The others: [max_batch_rows].
  absl::Span<uint64_t> sequence_ids;
  absl::Span<int32_t> state_rows;
  absl::Span<int32_t> lengths;
  absl::Span<int32_t> commits;
  absl::Span<const int32_t> statuses;  // v1::BatchRowStatus
};

// Views any tensor of the arena, as the daemon describes it: element [i0, i1, ...] is at data + sum(i x stride).
struct TensorView {
  std::byte* data = nullptr;
  std::vector<uint64_t> shape;
  std::vector<uint64_t> stride_bytes;
  std::string element;  // "u8", "i16", "i32" or "u64"
};

// Parts of a row, by row layout: LINEAR has kRow only.
enum class RowPart : uint8_t { kRow = 0, kK = 0, kV = 1, kValues = 0, kScales = 1 };

class Arena {
 public:
  // Fetches the descriptor from layout.descriptor_socket with the session's token, and maps it.
  //
  // UNAVAILABLE: nobody listens at the socket; PERMISSION_DENIED: it may not be opened, or the daemon sent no
  // descriptor; DEADLINE_EXCEEDED; FAILED_PRECONDITION: the daemon offers no descriptor, or the arena is on a GPU;
  // errors of FromDescriptor.
  static absl::StatusOr<std::shared_ptr<const Arena>> Map(const v1::AttachRequest& request,
                                                          const v1::Attached& attached, absl::Time deadline);
  // Maps an arena that is on a GPU: opens layout.cuda_ipc_handle, or fetches the descriptor, as Map does, and imports
  // the allocation. FAILED_PRECONDITION: the daemon offers neither; errors of Map's fetching and of DeviceMapping, of
  // which UNIMPLEMENTED means that this client was built without CUDA; INTERNAL as of FromDescriptor.
  static absl::StatusOr<std::shared_ptr<const Arena>> MapDevice(const v1::AttachRequest& request,
                                                                const v1::Attached& attached, absl::Time deadline);
  // Whether it is MapDevice that maps the arena, and not Map.
  static bool IsOnDevice(const v1::ArenaLayout& layout) {
    return !layout.cuda_ipc_handle().empty() || layout.allocation_bytes() > 0;
  }
  // The one or the other.
  static absl::StatusOr<std::shared_ptr<const Arena>> MapAnywhere(const v1::AttachRequest& request,
                                                                  const v1::Attached& attached, absl::Time deadline) {
    return IsOnDevice(attached.arena()) ? MapDevice(request, attached, deadline) : Map(request, attached, deadline);
  }
  // Checks the layout and maps `descriptor`. INTERNAL: a layout that cannot be (the message names tensor, field, value
  // and limit); RESOURCE_EXHAUSTED: no address space.
  static absl::StatusOr<std::shared_ptr<const Arena>> FromDescriptor(const v1::AttachRequest& request,
                                                                     const v1::Attached& attached,
                                                                     FileDescriptor descriptor);
  // An arena without memory: every view fails with `why`, which is not OK.
  static std::shared_ptr<const Arena> Unmapped(const absl::Status& why);

  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // OK when mapped.
  const absl::Status& status() const { return status_; }
  absl::Span<std::byte> bytes() const { return absl::Span<std::byte>(data_, size_bytes_); }
  bool on_device() const { return device_ != nullptr; }
  // Copies all of `view`, which must lie in bytes(), to or from host memory, and waits for that. Works for every mapped
  // arena. OUT_OF_RANGE: the view does not lie there.
  template <typename T>
  absl::Status CopyOut(absl::Span<T> view, std::remove_const_t<T>* target) const {
    return Copy(target, view.data(), view.data(), view.size() * sizeof(T));
  }
  template <typename T>
  absl::Status CopyIn(const T* source, absl::Span<T> view) const {
    return Copy(view.data(), source, view.data(), view.size() * sizeof(T));
  }
  // Index groups of the session.
  size_t groups() const { return groups_.size(); }
  size_t region_rows() const { return region_rows_; }
  size_t newest_row() const { return newest_row_; }
  // First hot row of a state row's region; its newest row is newest_row() further.
  size_t RegionBegin(uint32_t state_row) const { return state_row * region_rows_; }

  // Entries of a shared step, [max_batch_rows][max_top_k]. OUT_OF_RANGE names the group and how many there are.
  absl::StatusOr<MatrixView<int32_t>> Indices(uint32_t group) const;
  // Hot row of each entry.
  absl::StatusOr<MatrixView<const int32_t>> HotRows(uint32_t group) const;
  // Misses of each batch row.
  absl::StatusOr<absl::Span<const int32_t>> Misses(uint32_t group) const;
  // FAILED_PRECONDITION: the daemon is of a version without a server plane.
  absl::StatusOr<PlaneMail> Mail() const;
  // Empty when the session asked for none.
  absl::StatusOr<absl::Span<std::byte>> Staging() const;
  // The tensor of that name (ArenaLayout in sessions.proto), for as long as the arena lives. NOT_FOUND.
  absl::StatusOr<const TensorView*> Tensor(absl::string_view name) const;
  // One part of a layer's hot cache. NOT_FOUND: no index group has the layer; OUT_OF_RANGE: the layout has no such
  // part.
  absl::StatusOr<HotPartView> HotPart(uint32_t layer, RowPart part) const;
  // One row of it. OUT_OF_RANGE names hot_row and the number of rows.
  absl::StatusOr<absl::Span<std::byte>> HotRow(uint32_t layer, RowPart part, uint32_t hot_row) const;

 private:
  struct Group {
    MatrixView<int32_t> indices;
    MatrixView<const int32_t> hot_rows;
    absl::Span<const int32_t> misses;
  };
  struct Layer {
    HotPartView part[2];
  };

  Arena() = default;
  // The descriptor of layout.descriptor_socket.
  static absl::StatusOr<FileDescriptor> Fetch(const v1::Attached& attached, absl::Time deadline);
  static absl::StatusOr<std::unique_ptr<DeviceMapping>> OpenDevice(const v1::Attached& attached, absl::Time deadline);
  absl::StatusOr<const Group*> FindGroup(uint32_t group) const;
  // Makes the views of memory that is mapped at data_. The layout is what FromDescriptor says.
  absl::Status MakeViews(const v1::AttachRequest& request, const v1::Attached& attached);
  absl::Status Copy(void* to, const void* from, const void* view, size_t bytes) const;

  absl::Status status_;
  std::unique_ptr<DeviceMapping> device_;  // null: data_ is mapped host memory
  std::byte* data_ = nullptr;
  size_t size_bytes_ = 0;
  size_t region_rows_ = 0;
  size_t newest_row_ = 0;
  int part_count_ = 0;
  std::vector<Group> groups_;
  std::optional<PlaneMail> mail_;  // nothing: an older daemon's arena
  absl::flat_hash_map<uint32_t, Layer> layers_;
  absl::Span<std::byte> staging_;
  absl::flat_hash_map<std::string, TensorView> tensors_;
};

}  // namespace stoker::client
