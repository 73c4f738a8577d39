#include "client/replay/workload_file.h"

#include <cstring>
#include <fstream>
#include <initializer_list>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace stoker::replay {
namespace {

constexpr uint32_t kVersion = 1;
constexpr char kWorkloadMagic[] = "STKW";
constexpr char kDumpMagic[] = "STKG";
constexpr uint64_t kMaxElements = uint64_t{1} << 28;

absl::Status CheckRange(const char* field, uint32_t value, uint32_t min, uint32_t max) {
  if (value >= min && value <= max) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(field, " is ", value, "; it must be ", min, " to ", max));
}

absl::Status Annotated(const std::string& path, const absl::Status& status) {
  return absl::Status(status.code(), absl::StrCat(path, ": ", status.message()));
}

// A file with a magic and a header of uint32 fields, of which the first is the version. Remembers the first failure.
class Reader {
 public:
  explicit Reader(const std::string& path) : path_(path), file_(path, std::ios::binary | std::ios::ate) {
    if (!file_) {
      status_ = absl::NotFoundError(absl::StrCat(path, ": cannot be opened"));
      return;
    }
    left_ = static_cast<uint64_t>(file_.tellg());
    file_.seekg(0);
  }

  void Header(const char* magic, std::initializer_list<uint32_t*> fields) {
    char found[4] = {};
    uint32_t version = 0;
    Bytes(found, sizeof(found));
    Bytes(&version, sizeof(version));
    if (status_.ok() && (std::memcmp(found, magic, sizeof(found)) != 0 || version != kVersion)) {
      status_ = absl::InvalidArgumentError(absl::StrCat(path_, ": not a ", magic, " file of version ", kVersion));
    }
    for (uint32_t* field : fields) Bytes(field, sizeof(*field));
  }

  template <typename T>
  void Array(uint64_t count, std::vector<T>* values) {
    // Memory is asked for only when the file has the bytes.
    if (!Require(count * sizeof(T))) return;
    values->resize(count);
    Bytes(values->data(), count * sizeof(T));
  }

  void Fail(const absl::Status& status) {
    if (status_.ok() && !status.ok()) status_ = Annotated(path_, status);
  }

  absl::Status Finish() {
    if (status_.ok() && left_ != 0) {
      status_ = absl::InvalidArgumentError(absl::StrCat(path_, ": ", left_, " bytes after the end"));
    }
    return status_;
  }
  bool ok() const { return status_.ok(); }

 private:
  bool Require(uint64_t bytes) {
    if (status_.ok() && bytes > left_) {
      status_ = absl::InvalidArgumentError(
          absl::StrCat(path_, ": truncated: ", bytes, " more bytes are needed, ", left_, " are there"));
    }
    return status_.ok();
  }

  void Bytes(void* out, uint64_t bytes) {
    if (!Require(bytes)) return;
    if (!file_.read(static_cast<char*>(out), static_cast<std::streamsize>(bytes))) {
      status_ = absl::UnavailableError(absl::StrCat(path_, ": cannot be read"));
    }
    left_ -= bytes;
  }

  const std::string path_;
  std::ifstream file_;
  uint64_t left_ = 0;
  absl::Status status_;
};

class Writer {
 public:
  Writer(const std::string& path, const char* magic, std::initializer_list<uint32_t> fields)
      : path_(path), file_(path, std::ios::binary | std::ios::trunc) {
    file_.write(magic, 4);
    Array(&kVersion, 1);
    for (const uint32_t field : fields) Array(&field, 1);
  }

  template <typename T>
  void Array(const T* values, size_t count) {
    file_.write(reinterpret_cast<const char*>(values), static_cast<std::streamsize>(count * sizeof(T)));
  }

  absl::Status Finish() {
    file_.close();
    if (!file_) return absl::UnavailableError(absl::StrCat(path_, ": cannot be written"));
    return absl::OkStatus();
  }

 private:
  const std::string path_;
  std::ofstream file_;
};

}  // namespace

absl::Status ValidateWorkloadHeader(const Workload& w) {
  for (const absl::Status& status : {
           CheckRange("steps", w.steps, 1, 1000000),
           CheckRange("rows", w.rows, 1, 4096),
           CheckRange("top_k", w.top_k, 1, 8192),
           CheckRange("context", w.context, w.top_k + 1, uint32_t{1} << 24),
           CheckRange("hot_rows", w.hot_rows, w.top_k, 32768),
           CheckRange("row_bytes", w.row_bytes, 4, 65536),
       }) {
    if (!status.ok()) return status;
  }
  if (w.row_bytes % 4 != 0) {
    return absl::InvalidArgumentError(absl::StrCat("row_bytes is ", w.row_bytes, "; it must be a multiple of 4"));
  }
  const uint64_t elements = uint64_t{w.steps} * w.rows * w.top_k;
  if (elements > kMaxElements) {
    return absl::InvalidArgumentError(
        absl::StrCat("steps x rows x top_k is ", elements, "; it must be at most ", kMaxElements));
  }
  return absl::OkStatus();
}

absl::Status ValidateWorkload(const Workload& w) {
  if (absl::Status status = ValidateWorkloadHeader(w); !status.ok()) return status;
  const uint64_t elements = uint64_t{w.steps} * w.rows * w.top_k;
  if (w.positions.size() != elements) {
    return absl::InvalidArgumentError(
        absl::StrCat("positions has ", w.positions.size(), " entries; the header says ", elements));
  }
  // seen_in[p] is the number of the last (step, row) that had position p, from 1.
  std::vector<uint32_t> seen_in(w.context - 1, 0);
  for (size_t i = 0; i < w.positions.size(); ++i) {
    const size_t line = i / w.top_k;
    const int32_t position = w.positions[i];
    const auto error = [&](absl::string_view what) {
      return absl::InvalidArgumentError(absl::StrCat("positions[", line / w.rows, "][", line % w.rows, "][",
                                                     i % w.top_k, "] is ", position, "; ", what));
    };
    if (position < 0 || static_cast<uint32_t>(position) >= w.context - 1) {
      return error(absl::StrCat("it must be 0 to ", w.context - 2));
    }
    if (seen_in[position] == line + 1) return error("it stands twice in its row");
    seen_in[position] = static_cast<uint32_t>(line + 1);
  }
  return absl::OkStatus();
}

absl::StatusOr<Workload> ReadWorkload(const std::string& path) {
  Workload w;
  uint32_t reserved = 0;
  Reader reader(path);
  reader.Header(kWorkloadMagic, {&w.steps, &w.rows, &w.top_k, &w.context, &w.hot_rows, &w.row_bytes, &reserved});
  if (reader.ok()) reader.Fail(CheckRange("reserved", reserved, 0, 0));
  if (reader.ok()) reader.Fail(ValidateWorkloadHeader(w));
  if (reader.ok()) reader.Array(uint64_t{w.steps} * w.rows * w.top_k, &w.positions);
  if (absl::Status status = reader.Finish(); !status.ok()) return status;
  if (absl::Status status = ValidateWorkload(w); !status.ok()) return Annotated(path, status);
  return w;
}

absl::Status WriteWorkload(const Workload& w, const std::string& path) {
  if (absl::Status status = ValidateWorkload(w); !status.ok()) return status;
  Writer writer(path, kWorkloadMagic, {w.steps, w.rows, w.top_k, w.context, w.hot_rows, w.row_bytes, 0});
  writer.Array(w.positions.data(), w.positions.size());
  return writer.Finish();
}

absl::StatusOr<SlotDump> ReadSlotDump(const std::string& path) {
  SlotDump dump;
  Reader reader(path);
  reader.Header(kDumpMagic, {&dump.steps, &dump.rows, &dump.top_k, &dump.hot_rows});
  const uint64_t lines = uint64_t{dump.steps} * dump.rows;
  if (reader.ok()) reader.Fail(CheckRange("steps", dump.steps, 1, 1000000));
  if (reader.ok()) reader.Fail(CheckRange("rows", dump.rows, 1, 4096));
  if (reader.ok()) reader.Fail(CheckRange("top_k", dump.top_k, 1, 8192));
  if (reader.ok()) reader.Fail(CheckRange("hot_rows", dump.hot_rows, dump.top_k, 32768));
  if (reader.ok()) reader.Array(lines * dump.top_k, &dump.slots);
  if (reader.ok()) reader.Array(lines, &dump.misses);
  if (absl::Status status = reader.Finish(); !status.ok()) return status;
  return dump;
}

absl::Status WriteSlotDump(const SlotDump& dump, const std::string& path) {
  Writer writer(path, kDumpMagic, {dump.steps, dump.rows, dump.top_k, dump.hot_rows});
  writer.Array(dump.slots.data(), dump.slots.size());
  writer.Array(dump.misses.data(), dump.misses.size());
  return writer.Finish();
}

}  // namespace stoker::replay
