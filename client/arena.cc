#include "client/arena.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/descriptor_exchange.h"

namespace stoker::client {
namespace {

constexpr uint64_t kDsv4PageRows = 64;
constexpr uint64_t kDsv4ValueBytes = 576;
constexpr uint64_t kDsv4ScaleBytes = 8;
constexpr size_t kMaxRank = 3;
constexpr size_t kIpcHandleBytes = 64;  // of a cudaIpcMemHandle_t

// The session's figures that the tensors' shapes follow from.
struct Geometry {
  uint64_t hot_cache_rows = 0;  // of all state rows
  uint64_t max_batch_rows = 0;
  uint64_t max_top_k = 0;
};

// A tensor that has passed CheckBounds.
struct Tensor {
  const v1::ArenaTensor* layout = nullptr;
  uint64_t begin = 0;
  uint64_t end = 0;  // behind its last byte
  bool dense = false;
};

using Tensors = absl::flat_hash_map<absl::string_view, Tensor>;

uint64_t ElementBytes(absl::string_view element) {
  if (element == "u8") return 1;
  if (element == "i16") return 2;
  if (element == "i32") return 4;
  if (element == "u64") return 8;
  return 0;
}

absl::Status Malformed(const v1::ArenaTensor& tensor, absl::string_view what) {
  return absl::InternalError(absl::StrCat("arena tensor '", tensor.name(), "': ", what));
}

// Checks that every element lies inside [0, size_bytes), that elements are aligned, and that no two of them overlap.
absl::StatusOr<Tensor> CheckBounds(const v1::ArenaTensor& layout, uint64_t size_bytes) {
  const uint64_t element_bytes = ElementBytes(layout.element());
  if (element_bytes == 0) {
    return Malformed(layout, absl::StrCat("element '", layout.element(), "' is not u8, i16, i32 or u64"));
  }
  const auto rank = static_cast<size_t>(layout.shape_size());
  if (rank == 0 || rank > kMaxRank || layout.stride_bytes_size() != layout.shape_size()) {
    return Malformed(layout,
                     absl::StrCat("shape has ", rank, " dimensions and stride_bytes ", layout.stride_bytes_size(),
                                  "; equal numbers of 1 to ", kMaxRank, " are possible"));
  }
  if (layout.offset_bytes() % element_bytes != 0) {
    return Malformed(layout,
                     absl::StrCat("offset_bytes ", layout.offset_bytes(), " is no multiple of ", element_bytes));
  }
  // From the innermost dimension outwards: `extent` is the span of the dimensions seen so far.
  uint64_t extent = element_bytes;
  bool dense = true;
  bool empty = false;
  for (size_t i = rank; i-- > 0;) {
    const uint64_t count = layout.shape(static_cast<int>(i));
    const uint64_t stride = layout.stride_bytes(static_cast<int>(i));
    if (count == 0) {
      empty = true;
      continue;
    }
    if (stride % element_bytes != 0 || stride < extent) {
      return Malformed(layout, absl::StrCat("stride_bytes[", i, "] ", stride, " is no multiple of ", element_bytes,
                                            " or less than the ", extent, " bytes that one step must span"));
    }
    dense = dense && (stride == extent || count == 1);
    uint64_t steps = 0;
    if (__builtin_mul_overflow(count - 1, stride, &steps) || __builtin_add_overflow(extent, steps, &extent)) {
      return Malformed(
          layout, absl::StrCat("shape[", i, "] ", count, " x stride_bytes[", i, "] ", stride, " overflows 64 bits"));
    }
  }
  if (empty) extent = 0;
  uint64_t end = 0;
  if (__builtin_add_overflow(layout.offset_bytes(), extent, &end) || end > size_bytes) {
    return Malformed(layout, absl::StrCat("offset_bytes ", layout.offset_bytes(), " and ", extent,
                                          " bytes reach beyond size_bytes ", size_bytes));
  }
  return Tensor{&layout, layout.offset_bytes(), end, dense && !empty};
}

absl::StatusOr<Tensors> CheckTensors(const v1::ArenaLayout& layout) {
  Tensors tensors;
  std::vector<const Tensor*> dense;
  tensors.reserve(static_cast<size_t>(layout.tensors_size()));
  for (const v1::ArenaTensor& tensor : layout.tensors()) {
    absl::StatusOr<Tensor> checked = CheckBounds(tensor, layout.size_bytes());
    if (!checked.ok()) return checked.status();
    if (!tensors.emplace(tensor.name(), *checked).second) return Malformed(tensor, "is there twice");
  }
  // Tensors with gaps may be interleaved, as the values and scales of DSV4 pages are; only dense ones can be compared.
  for (const auto& [name, tensor] : tensors) {
    if (tensor.dense) dense.push_back(&tensor);
  }
  std::sort(dense.begin(), dense.end(), [](const Tensor* a, const Tensor* b) { return a->begin < b->begin; });
  for (size_t i = 1; i < dense.size(); ++i) {
    if (dense[i]->begin < dense[i - 1]->end) {
      return Malformed(*dense[i]->layout,
                       absl::StrCat("offset_bytes ", dense[i]->begin, " lies inside '", dense[i - 1]->layout->name(),
                                    "', which ends at ", dense[i - 1]->end));
    }
  }
  return tensors;
}

// Whether elements of the innermost dimension must follow each other.
enum class Elements { kDense, kApart };

// The tensor of that name, which must have that shape and element.
absl::StatusOr<const v1::ArenaTensor*> Find(const Tensors& tensors, const std::string& name, absl::string_view element,
                                            std::initializer_list<uint64_t> shape,
                                            Elements elements = Elements::kDense) {
  const auto found = tensors.find(name);
  if (found == tensors.end()) return absl::InternalError(absl::StrCat("arena tensor '", name, "' is missing"));
  const v1::ArenaTensor& tensor = *found->second.layout;
  if (tensor.element() != element) {
    return Malformed(tensor, absl::StrCat("element is '", tensor.element(), "', not '", element, "'"));
  }
  if (!std::equal(shape.begin(), shape.end(), tensor.shape().begin(), tensor.shape().end())) {
    return Malformed(tensor, absl::StrCat("shape is [", absl::StrJoin(tensor.shape(), ", "), "], not [",
                                          absl::StrJoin(shape, ", "), "]"));
  }
  const int last = tensor.shape_size() - 1;
  const uint64_t element_bytes = ElementBytes(element);
  if (elements == Elements::kDense && tensor.shape(last) > 1 && tensor.stride_bytes(last) != element_bytes) {
    return Malformed(tensor,
                     absl::StrCat("stride_bytes[", last, "] is ", tensor.stride_bytes(last), ", not ", element_bytes));
  }
  return &tensor;
}

template <typename T>
absl::StatusOr<MatrixView<T>> FindMatrix(const Tensors& tensors, std::byte* data, const std::string& name,
                                         const Geometry& geometry) {
  absl::StatusOr<const v1::ArenaTensor*> tensor =
      Find(tensors, name, "i32", {geometry.max_batch_rows, geometry.max_top_k});
  if (!tensor.ok()) return tensor.status();
  return MatrixView<T>(data + (*tensor)->offset_bytes(), geometry.max_batch_rows, geometry.max_top_k,
                       (*tensor)->stride_bytes(0));
}

template <typename T>
absl::StatusOr<absl::Span<T>> FindArray(const Tensors& tensors, std::byte* data, const std::string& name,
                                        absl::string_view element, uint64_t count) {
  absl::StatusOr<const v1::ArenaTensor*> tensor = Find(tensors, name, element, {count});
  if (!tensor.ok()) return tensor.status();
  return absl::Span<T>(reinterpret_cast<T*>(data + (*tensor)->offset_bytes()), count);
}

template <typename T>
absl::StatusOr<StridedView<T>> FindDoorbells(const Tensors& tensors, std::byte* data, const std::string& name,
                                             uint64_t count) {
  absl::StatusOr<const v1::ArenaTensor*> tensor = Find(tensors, name, "u64", {count}, Elements::kApart);
  if (!tensor.ok()) return tensor.status();
  return StridedView<T>(data + (*tensor)->offset_bytes(), count, (*tensor)->stride_bytes(0));
}

// Nothing where none of its tensors is there.
absl::StatusOr<std::optional<PlaneMail>> FindMail(const Tensors& tensors, std::byte* data, uint64_t groups,
                                                  uint64_t max_batch_rows) {
  constexpr absl::string_view kNames[] = {"request",    "done",    "ended",   "batch_rows", "sequence_ids",
                                          "state_rows", "lengths", "commits", "statuses"};
  if (std::none_of(std::begin(kNames), std::end(kNames),
                   [&](absl::string_view name) { return tensors.contains(name); })) {
    return std::nullopt;
  }
  const auto request = FindDoorbells<uint64_t>(tensors, data, "request", groups + 1);
  const auto done = FindDoorbells<const uint64_t>(tensors, data, "done", groups + 1);
  const auto ended = FindArray<const int32_t>(tensors, data, "ended", "i32", 1);
  const auto batch_rows = FindArray<int32_t>(tensors, data, "batch_rows", "i32", 1);
  const auto sequence_ids = FindArray<uint64_t>(tensors, data, "sequence_ids", "u64", max_batch_rows);
  const auto state_rows = FindArray<int32_t>(tensors, data, "state_rows", "i32", max_batch_rows);
  const auto lengths = FindArray<int32_t>(tensors, data, "lengths", "i32", max_batch_rows);
  const auto commits = FindArray<int32_t>(tensors, data, "commits", "i32", max_batch_rows);
  const auto statuses = FindArray<const int32_t>(tensors, data, "statuses", "i32", max_batch_rows);
  for (const absl::Status& status :
       {request.status(), done.status(), ended.status(), batch_rows.status(), sequence_ids.status(),
        state_rows.status(), lengths.status(), commits.status(), statuses.status()}) {
    if (!status.ok()) return status;
  }
  PlaneMail mail;
  mail.request = *request;
  mail.done = *done;
  mail.ended = ended->data();
  mail.batch_rows = batch_rows->data();
  mail.sequence_ids = *sequence_ids;
  mail.state_rows = *state_rows;
  mail.lengths = *lengths;
  mail.commits = *commits;
  mail.statuses = *statuses;
  return mail;
}

absl::StatusOr<HotPartView> FindRows(const Tensors& tensors, std::byte* data, const std::string& name,
                                     uint64_t row_bytes, const Geometry& geometry) {
  absl::StatusOr<const v1::ArenaTensor*> tensor = Find(tensors, name, "u8", {geometry.hot_cache_rows, row_bytes});
  if (!tensor.ok()) return tensor.status();
  const uint64_t stride = (*tensor)->stride_bytes(0);
  return HotPartView(data + (*tensor)->offset_bytes(), geometry.hot_cache_rows, row_bytes, 1, stride, 0);
}

absl::StatusOr<HotPartView> FindPages(const Tensors& tensors, std::byte* data, const std::string& name,
                                      uint64_t row_bytes, const Geometry& geometry) {
  absl::StatusOr<const v1::ArenaTensor*> tensor =
      Find(tensors, name, "u8", {geometry.hot_cache_rows / kDsv4PageRows, kDsv4PageRows, row_bytes});
  if (!tensor.ok()) return tensor.status();
  return HotPartView(data + (*tensor)->offset_bytes(), geometry.hot_cache_rows, row_bytes, kDsv4PageRows,
                     (*tensor)->stride_bytes(0), (*tensor)->stride_bytes(1));
}

absl::Status CheckSize(const v1::ArenaLayout& layout) {
  if (layout.size_bytes() > 0 && layout.size_bytes() <= std::numeric_limits<ptrdiff_t>::max()) return absl::OkStatus();
  return absl::InternalError(
      absl::StrCat("arena size_bytes ", layout.size_bytes(), " is not 1 to ", std::numeric_limits<ptrdiff_t>::max()));
}

}  // namespace

FileDescriptor::~FileDescriptor() {
  // Nothing was written through it, so there is no error to lose.
  if (valid()) close(value_);
}

FileDescriptor& FileDescriptor::operator=(FileDescriptor&& other) noexcept {
  std::swap(value_, other.value_);
  return *this;
}

Arena::~Arena() {
  if (device_ == nullptr && data_ != nullptr) munmap(data_, size_bytes_);
}

absl::StatusOr<std::shared_ptr<const Arena>> Arena::Map(const v1::AttachRequest& request, const v1::Attached& attached,
                                                        absl::Time deadline) {
  if (IsOnDevice(attached.arena())) {
    return absl::FailedPreconditionError(
        absl::StrCat("the arena is memory of ", attached.device(), ", not of the host: ask for ArenaMapping::kDevice"));
  }
  absl::StatusOr<FileDescriptor> descriptor = Fetch(attached, deadline);
  if (!descriptor.ok()) return descriptor.status();
  return FromDescriptor(request, attached, *std::move(descriptor));
}

absl::StatusOr<FileDescriptor> Arena::Fetch(const v1::Attached& attached, absl::Time deadline) {
  const std::string& path = attached.arena().descriptor_socket();
  if (path.empty()) {
    return absl::FailedPreconditionError("the daemon offers no descriptor of the arena: descriptor_socket is empty");
  }
  return FetchDescriptor(path, attached.token(), deadline);
}

std::shared_ptr<const Arena> Arena::Unmapped(const absl::Status& why) {
  std::shared_ptr<Arena> arena(new Arena);
  arena->status_ = why;
  return arena;
}

absl::StatusOr<std::unique_ptr<DeviceMapping>> Arena::OpenDevice(const v1::Attached& attached, absl::Time deadline) {
  const v1::ArenaLayout& layout = attached.arena();
  if (layout.allocation_bytes() > 0) {
    if (layout.allocation_bytes() < layout.size_bytes()) {
      return absl::InternalError(absl::StrCat("arena size_bytes ", layout.size_bytes(), " is more than the ",
                                              layout.allocation_bytes(), " of allocation_bytes"));
    }
    const absl::StatusOr<FileDescriptor> descriptor = Fetch(attached, deadline);
    if (!descriptor.ok()) return descriptor.status();
    return DeviceMapping::Import(descriptor->get(), attached.device(), layout.allocation_bytes());
  }
  if (layout.cuda_ipc_handle().size() != kIpcHandleBytes) {
    return absl::InternalError(
        absl::StrCat("arena cuda_ipc_handle has ", layout.cuda_ipc_handle().size(), " bytes, not ", kIpcHandleBytes));
  }
  return DeviceMapping::Open(layout.cuda_ipc_handle(), attached.device(), layout.size_bytes());
}

absl::StatusOr<std::shared_ptr<const Arena>> Arena::MapDevice(const v1::AttachRequest& request,
                                                              const v1::Attached& attached, absl::Time deadline) {
  const v1::ArenaLayout& layout = attached.arena();
  if (!IsOnDevice(layout)) {
    return absl::FailedPreconditionError(
        "the daemon offers no memory of a GPU: cuda_ipc_handle is empty, allocation_bytes is 0");
  }
  if (absl::Status status = CheckSize(layout); !status.ok()) return status;
  absl::StatusOr<std::unique_ptr<DeviceMapping>> mapping = OpenDevice(attached, deadline);
  if (!mapping.ok()) return mapping.status();
  std::shared_ptr<Arena> arena(new Arena);
  arena->device_ = *std::move(mapping);
  arena->data_ = arena->device_->data();
  if (absl::Status status = arena->MakeViews(request, attached); !status.ok()) return status;
  return arena;
}

absl::StatusOr<std::shared_ptr<const Arena>> Arena::FromDescriptor(const v1::AttachRequest& request,
                                                                   const v1::Attached& attached,
                                                                   FileDescriptor descriptor) {
  const v1::ArenaLayout& layout = attached.arena();
  if (absl::Status status = CheckSize(layout); !status.ok()) return status;
  struct stat file {};
  if (fstat(descriptor.get(), &file) != 0) return absl::ErrnoToStatus(errno, "arena descriptor");
  if (file.st_size < 0 || static_cast<uint64_t>(file.st_size) < layout.size_bytes()) {
    return absl::InternalError(absl::StrCat("arena size_bytes ", layout.size_bytes(), " is more than the ",
                                            file.st_size, " bytes behind the descriptor"));
  }
  std::shared_ptr<Arena> arena(new Arena);
  void* const mapping = mmap(nullptr, layout.size_bytes(), PROT_READ | PROT_WRITE, MAP_SHARED, descriptor.get(), 0);
  if (mapping == MAP_FAILED) {
    const int error = errno;
    return error == ENOMEM ? absl::ResourceExhaustedError(
                                 absl::StrCat("arena of ", layout.size_bytes(), " bytes: no address space"))
                           : absl::ErrnoToStatus(error, absl::StrCat("arena of ", layout.size_bytes(), " bytes"));
  }
  arena->data_ = static_cast<std::byte*>(mapping);
  arena->size_bytes_ = layout.size_bytes();
  if (absl::Status status = arena->MakeViews(request, attached); !status.ok()) return status;
  return arena;
}

absl::Status Arena::MakeViews(const v1::AttachRequest& request, const v1::Attached& attached) {
  const v1::ArenaLayout& layout = attached.arena();
  absl::StatusOr<Tensors> tensors = CheckTensors(layout);
  if (!tensors.ok()) return tensors.status();
  if (layout.region_rows() < request.hot_rows() || layout.newest_row() >= layout.region_rows()) {
    return absl::InternalError(absl::StrCat("arena region_rows ", layout.region_rows(), " and newest_row ",
                                            layout.newest_row(), " cannot be with ", request.hot_rows(), " hot_rows"));
  }
  Geometry geometry;
  geometry.hot_cache_rows = uint64_t{request.state_rows()} * layout.region_rows();
  geometry.max_batch_rows = request.max_batch_rows() != 0 ? request.max_batch_rows() : request.state_rows();
  geometry.max_top_k = request.max_top_k();
  std::byte* const data = data_;
  size_bytes_ = layout.size_bytes();
  region_rows_ = layout.region_rows();
  newest_row_ = layout.newest_row();

  const v1::PoolSpec& pool = attached.pool();
  part_count_ = pool.row_layout() == v1::ROW_LAYOUT_LINEAR ? 1 : 2;
  if (pool.row_layout() == v1::ROW_LAYOUT_DSV4_PAGED && layout.region_rows() % kDsv4PageRows != 0) {
    return absl::InternalError(
        absl::StrCat("arena region_rows ", layout.region_rows(), " is no multiple of ", kDsv4PageRows));
  }
  const auto find_part = [&](uint32_t layer, int part) -> absl::StatusOr<HotPartView> {
    const std::string name = absl::StrCat("hot.", layer);
    switch (pool.row_layout()) {
      case v1::ROW_LAYOUT_LINEAR:
        return FindRows(*tensors, data, name, pool.row_bytes(), geometry);
      case v1::ROW_LAYOUT_SPLIT_KV:
        return part == 0 ? FindRows(*tensors, data, name + ".k", pool.row_bytes(), geometry)
                         : FindRows(*tensors, data, name + ".v", pool.v_row_bytes(), geometry);
      case v1::ROW_LAYOUT_DSV4_PAGED:
        return part == 0 ? FindPages(*tensors, data, name + ".values", kDsv4ValueBytes, geometry)
                         : FindPages(*tensors, data, name + ".scales", kDsv4ScaleBytes, geometry);
      default:
        return absl::InternalError(absl::StrCat("row_layout ", pool.row_layout(), " of pool '", pool.name(),
                                                "' is unknown to this version of the client"));
    }
  };
  groups_.reserve(static_cast<size_t>(request.groups_size()));
  for (int i = 0; i < request.groups_size(); ++i) {
    Group& group = groups_.emplace_back();
    auto indices = FindMatrix<int32_t>(*tensors, data, absl::StrCat("indices.", i), geometry);
    if (!indices.ok()) return indices.status();
    group.indices = *indices;
    auto hot_rows = FindMatrix<const int32_t>(*tensors, data, absl::StrCat("hot_rows.", i), geometry);
    if (!hot_rows.ok()) return hot_rows.status();
    group.hot_rows = *hot_rows;
    auto misses = FindArray<const int32_t>(*tensors, data, absl::StrCat("misses.", i), "i32", geometry.max_batch_rows);
    if (!misses.ok()) return misses.status();
    group.misses = *misses;
    for (const uint32_t layer : request.groups(i).layers()) {
      Layer& parts = layers_[layer];
      for (int part = 0; part < part_count_; ++part) {
        absl::StatusOr<HotPartView> view = find_part(layer, part);
        if (!view.ok()) return view.status();
        parts.part[part] = *view;
      }
    }
  }
  auto mail = FindMail(*tensors, data, groups_.size(), geometry.max_batch_rows);
  if (!mail.ok()) return mail.status();
  mail_ = *mail;
  if (request.staging_bytes() > 0) {
    auto staging = FindArray<std::byte>(*tensors, data, "staging", "u8", request.staging_bytes());
    if (!staging.ok()) return staging.status();
    staging_ = *staging;
  }
  for (const v1::ArenaTensor& tensor : layout.tensors()) {
    tensors_[tensor.name()] = {data + tensor.offset_bytes(),
                               {tensor.shape().begin(), tensor.shape().end()},
                               {tensor.stride_bytes().begin(), tensor.stride_bytes().end()},
                               tensor.element()};
  }
  return absl::OkStatus();
}

absl::Status Arena::Copy(void* to, const void* from, const void* view, size_t bytes) const {
  if (!status_.ok()) return status_;
  const auto begin = reinterpret_cast<uintptr_t>(data_), at = reinterpret_cast<uintptr_t>(view);
  if (at < begin || at - begin > size_bytes_ || bytes > size_bytes_ - (at - begin)) {
    return absl::OutOfRangeError(absl::StrCat("view of ", bytes, " bytes does not lie in the arena"));
  }
  if (device_ != nullptr) return device_->Copy(to, from, bytes);
  if (bytes > 0) std::memcpy(to, from, bytes);
  return absl::OkStatus();
}

absl::StatusOr<const Arena::Group*> Arena::FindGroup(uint32_t group) const {
  if (!status_.ok()) return status_;
  if (group >= groups_.size()) {
    return absl::OutOfRangeError(
        absl::StrCat("group ", group, " is not below the ", groups_.size(), " of the session"));
  }
  return &groups_[group];
}

absl::StatusOr<MatrixView<int32_t>> Arena::Indices(uint32_t group) const {
  absl::StatusOr<const Group*> found = FindGroup(group);
  if (!found.ok()) return found.status();
  return (*found)->indices;
}

absl::StatusOr<MatrixView<const int32_t>> Arena::HotRows(uint32_t group) const {
  absl::StatusOr<const Group*> found = FindGroup(group);
  if (!found.ok()) return found.status();
  return (*found)->hot_rows;
}

absl::StatusOr<absl::Span<const int32_t>> Arena::Misses(uint32_t group) const {
  absl::StatusOr<const Group*> found = FindGroup(group);
  if (!found.ok()) return found.status();
  return (*found)->misses;
}

absl::StatusOr<PlaneMail> Arena::Mail() const {
  if (!status_.ok()) return status_;
  if (!mail_.has_value()) {
    return absl::FailedPreconditionError(
        "the arena has no doorbells (tensor 'request'): the daemon is of a version without a server plane");
  }
  return *mail_;
}

absl::StatusOr<absl::Span<std::byte>> Arena::Staging() const {
  if (!status_.ok()) return status_;
  return staging_;
}

absl::StatusOr<const TensorView*> Arena::Tensor(absl::string_view name) const {
  if (!status_.ok()) return status_;
  const auto found = tensors_.find(name);
  if (found == tensors_.end()) return absl::NotFoundError(absl::StrCat("the arena has no tensor '", name, "'"));
  return &found->second;
}

absl::StatusOr<HotPartView> Arena::HotPart(uint32_t layer, RowPart part) const {
  if (!status_.ok()) return status_;
  const auto found = layers_.find(layer);
  if (found == layers_.end()) {
    return absl::NotFoundError(absl::StrCat("layer ", layer, " is in no index group of the session"));
  }
  const int index = static_cast<int>(part);
  if (index < 0 || index >= part_count_) {
    return absl::OutOfRangeError(absl::StrCat("part ", index, " is not below the ", part_count_, " of the row layout"));
  }
  return found->second.part[index];
}

absl::StatusOr<absl::Span<std::byte>> Arena::HotRow(uint32_t layer, RowPart part, uint32_t hot_row) const {
  absl::StatusOr<HotPartView> view = HotPart(layer, part);
  if (!view.ok()) return view.status();
  if (hot_row >= view->rows()) {
    return absl::OutOfRangeError(absl::StrCat("hot_row ", hot_row, " is not below the ", view->rows(), " of a layer"));
  }
  return (*view)[hot_row];
}

}  // namespace stoker::client
