#include "client/replay/row_device.h"

#include <cstring>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace stoker::replay {

std::string DescribeWrongRow(const RowOracle& oracle, const BatchRow& row, size_t batch_row, size_t entry,
                             uint32_t layer, int32_t position, int32_t hot_row, absl::Span<const std::byte> bytes) {
  if (row.sequence == nullptr) {
    return absl::StrFormat("layer %d: hot row %d, the answer to entry %d of batch row %d, which is padding, must be -1",
                           layer, hot_row, entry, batch_row);
  }
  const OpenSequence& sequence = *row.sequence;
  std::string text = absl::StrFormat(
      "request %d, position %d, layer %d: hot row %d of state row %d, the answer to entry %d of batch row %d",
      sequence.request->number, position, layer, hot_row, sequence.state_row, entry, batch_row);
  if (bytes.empty()) return text + ", cannot be right";
  std::vector<std::byte> expected(oracle.shape().bytes());
  oracle.Fill(RowOracle::Key(layer, sequence.request->Token(static_cast<uint32_t>(position))), expected.data());
  for (size_t at = 0; at + 4 <= bytes.size() && at + 4 <= expected.size(); at += 4) {
    uint32_t found, wanted;
    std::memcpy(&found, bytes.data() + at, 4);
    std::memcpy(&wanted, expected.data() + at, 4);
    if (found != wanted) return text + absl::StrFormat(": byte %d is %08x, must be %08x", at, found, wanted);
  }
  return text + ": right when it was looked at again";
}

}  // namespace stoker::replay
